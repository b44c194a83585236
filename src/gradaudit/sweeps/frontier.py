"""Leakage against utility: which defense stops the attacks at what cost, and which one to take."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradaudit.record import Interval, Record
from gradaudit.scores import scores_of
from gradaudit.sweeps import images, text  # noqa: F401 - each registers its measure
from gradaudit.sweeps.measure import MEASURES, Measure
from gradaudit.sweeps.result import Result
from gradaudit.sweeps.utility import Utility
from gradaudit.verdict.run import verdict

USEFUL = 0.25
"""Share of the best MCC below which a setting has not learned the task, and is recommended to nobody; nor is one whose
interval holds 0."""
BOUND = frozenset({"defense-not-modeled", "dropout-not-modeled"})
"""Flags of an attack that does not know what it is up against: its score is a lower bound."""


@dataclass(frozen=True)
class OperatingPoint:
    """One way for the client to train, at one batch size.

    Args:
        client: in words: what of the axes belongs to the client.
        batch_size: sentences of the attacked updates.
        leak: of the strongest attack, in the unit of `measure`.
        blind: the same without any gradient.
        exact: share of sentences that some attack read exactly, of images that some attack recovered so well that they
            can be recognized, 0 to 100.
        blind_exact: the same without any gradient.
        attack: the strongest.
        bound: some attack does not reckon with this client, or failed: the leak is a lower bound.
        utility: what the model is worth.
        unsupported: attacks that do not support this client, and were not run.
        worst: the record and the number, from 0, of the sentence or image that the strongest attack read best.
        silent: no attack told more than blind guessing, by its own interval's upper end, none read anything exactly,
            and the report of these runs would not say that anything leaks.
        dominated: another point of this batch size is at least as good in both, and better in one.
        measure: of the leak.
        family: names of its defenses, whatever their fields.
    """

    client: str
    batch_size: int
    leak: Interval
    blind: float
    exact: float
    blind_exact: float
    attack: str
    bound: bool
    utility: Utility
    silent: bool
    unsupported: tuple[str, ...] = ()
    worst: tuple[Record, int] | None = None
    dominated: bool = False
    measure: Measure = MEASURES["text"]
    family: str = "no defense"


@dataclass(frozen=True)
class Frontier:
    """All operating points of one batch size.

    Args:
        batch_size: sentences of the attacked updates.
        points: those of the highest utility first.
        chosen: the one to take; None where no point is silent.
        reason: why that one, or why none, as a sentence.
        missing: clients of which an attack or the utility is missing, with the reason.
    """

    batch_size: int
    points: tuple[OperatingPoint, ...]
    chosen: OperatingPoint | None
    reason: str
    missing: tuple[str, ...] = ()


def frontiers(results: Sequence[Result]) -> tuple[Frontier, ...]:
    """Return the frontier of each batch size.

    Args:
        results: of a sweep with a [utility] table; several attacks on one client count by the strongest.
    """
    sizes = sorted({r.point.case.data.batch_size for r in results})
    return tuple(_frontier(size, [r for r in results if r.point.case.data.batch_size == size]) for size in sizes)


def _frontier(size: int, results: Sequence[Result]) -> Frontier:
    groups: dict[str, list[Result]] = {}
    for result in results:
        case = result.point.case.resolved()
        # all but what the attacker is and knows, and which rows are attacked
        told = {
            k: v
            for k, v in case.items()
            if k not in ("name", "attack", "knowledge", "public", "selection", "metrics", "published")
        }
        told["data"] = {k: v for k, v in told["data"].items() if k not in ("batches", "skip", "shuffle_seed")}
        groups.setdefault(json.dumps(told, sort_keys=True), []).append(result)
    points, missing = [], []
    for group in groups.values():
        point = _point(size, [r for r in group if r.point.case.attack.get("name") != "blind"])
        if point is not None:
            points.append(point)
        missing += _missing(group)
    return frontier_of(size, points, missing)


def frontier_of(size: int, points: Sequence[OperatingPoint], missing: Sequence[str] = ()) -> Frontier:
    """Return the frontier of some operating points.

    Args:
        size: of the batches.
        points: in any order; which are dominated is found here.
        missing: what could not be measured, a line each.
    """
    marked = [_marked(p, points) for p in sorted(points, key=lambda p: (-p.utility.mcc, p.leak.mean or 0.0))]
    chosen, reason = _choice(marked)
    return Frontier(size, tuple(marked), chosen, reason, tuple(missing))


def _missing(group: Sequence[Result]) -> list[str]:
    """What of a client's results is not there, in words."""
    lines = []
    for result in group:
        name = result.point.case.attack.get("name")
        some = result.summary.failed if result.summary is not None else 0
        if result.unsupported:
            lines.append(f"{_client(result)}, {name}: not supported")
        elif result.failed:
            lines.append(f"{_client(result)}, {name}: {result.failed}")
        elif some and result.summary is not None:
            lines.append(f"{_client(result)}, {name}: {some} of {result.summary.n} batches failed and count 0")
    why = next((r.no_utility for r in group if r.no_utility), None)
    if why or not any(r.utility for r in group):
        lines.append(f"{_client(group[0])}, utility: {why or 'not measured'}")
    return lines


def _client(result: Result) -> str:
    """What of a point's axes is the client's, in words."""
    own = ("defense", "client", "lora", "model")
    said = [f"{v}" if k == "defense" else f"{k} {v}" for k, v in result.point.values.items() if k.split(".")[0] in own]
    return ", ".join(said) or "the case's client"


def _point(size: int, group: Sequence[Result]) -> OperatingPoint | None:
    scored = [(r, r.summary) for r in group if r.summary is not None and not r.failed and r.utility is not None]
    if not scored:
        return None
    able = [r for r in group if not r.unsupported]
    measure = MEASURES[scores_of(scored[0][1].scores).kind]
    best, summary = max(scored, key=lambda pair: measure.leak(pair[1])[0].mean or 0.0)
    leak, blind = measure.leak(summary)
    assert best.utility is not None
    exact = max(measure.exact(s, r.records)[0] for r, s in scored)
    blind_exact = measure.exact(summary, best.records)[1]
    told = verdict([s for _, s in scored], [record for r, _ in scored for record in r.records])
    loudest = max(_most(*measure.leak(s)) for _, s in scored)
    return OperatingPoint(
        family=" + ".join(str(d.get("name")) for d in best.point.case.defense) or "no defense",
        client=_client(best),
        batch_size=size,
        leak=leak,
        blind=blind,
        exact=exact,
        blind_exact=blind_exact,
        silent=loudest <= measure.margin and exact <= blind_exact and told.level not in ("leaks", "partly"),
        attack=summary.attack,
        bound=any(BOUND & set(s.flags) or s.failed for _, s in scored) or len(scored) < len(able),
        unsupported=tuple(sorted({str(r.point.case.attack.get("name")) for r in group if r.unsupported})),
        utility=best.utility,
        worst=measure.worst(best.records),
        measure=measure,
    )


def _most(leak: Interval, blind: float) -> float:
    """Return how much more than blind guessing an attack may have told: the upper end of its interval."""
    high = leak.high if leak.high is not None else leak.worst
    return (high or 0.0) - blind


def _marked(point: OperatingPoint, points: Sequence[OperatingPoint]) -> OperatingPoint:
    mine = (point.utility.mcc, -(point.leak.mean or 0.0))
    others = [(p.utility.mcc, -(p.leak.mean or 0.0)) for p in points]
    beaten = any(o != mine and o[0] >= mine[0] and o[1] >= mine[1] for o in others)
    return replace(point, dominated=beaten)


def _choice(points: Sequence[OperatingPoint]) -> tuple[OperatingPoint | None, str]:
    if not points:
        return None, "Nothing was measured here."
    best = max(p.utility.mcc for p in points)
    silent = [p for p in points if p.silent]
    if not silent:
        least = min(points, key=lambda p: p.leak.mean or 0.0)
        told = (
            f"{least.leak.mean or 0:.1f} {least.measure.name} by '{least.attack}' where blind guessing gives "
            f"{least.blind:.1f}"
        )
        return None, f"No setting blocks every attack: the least leaks with {least.client}, {told}."
    useful = [p for p in silent if p.utility.mcc_low > 0 and p.utility.mcc >= USEFUL * best]
    if not useful:
        most = max(p.utility.mcc for p in silent)
        return None, (
            f"No setting is both private and useful: those that block every attack reach at most MCC {most:.1f}, the "
            f"best here {best:.1f}."
        )
    chosen = max([p for p in useful if not p.bound] or useful, key=lambda p: p.utility.mcc)
    reason = (
        f"Take {chosen.client}: no attack that was run told more than blind guessing, and it keeps MCC "
        f"{chosen.utility.mcc:.1f} where the best here has {best:.1f}."
    )
    if chosen.bound:
        reason += (
            " Some attack does not reckon with it or failed: its leak is a lower bound, and no proof that it holds."
        )
    if chosen.utility.epsilon is None:
        reason += " It carries no formal guarantee."
    return chosen, reason
