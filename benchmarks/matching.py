"""Grab, LAMP, TAG and DLG at one stated budget: a table a group, paired differences between neighbors.

    OMP_NUM_THREADS=1 python benchmarks/matching.py order

Groups: order (practical setting, B = 1), order2 (B = 2), benchmark (dropout off), dropout (0.1 to 0.4), pruning, noise,
unknown (labels and lengths), partial (parts of the gradient, dropout off), variants (ours, in order's setting), prior
(LAMP's language model, dropout off), own-masks (learned for each text alone, and none). All cells of a group spend
about as many gradient evaluations (a step with double backward counts three), order2, curves, unknown, partial and
prior a third; paper budgets are in cases/. Batch by batch, so that a group that is stopped has as many of each attack.
Records go to out/benchmarks. Failures count 0.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from grid import OFF, PRACTICAL, Cell, Done, Program, main

# about 7,500 evaluations, what TAG's published 2500 steps cost; the published decay, as far down, in fewer steps
GRAB: dict[str, Any] = {
    "name": "grab", "rounds": 2, "steps": 700, "decay": 0.89 ** (20 / 7), "starts": 200, "permutations": 100,
}  # fmt: skip
LAMP: dict[str, Any] = {
    "name": "lamp", "steps": 1700, "decay": 0.89 ** (20 / 17), "starts": 200, "permutations": 200, "edits": 90,
}  # fmt: skip
TAG: dict[str, Any] = {"name": "tag"}
DLG: dict[str, Any] = {"name": "dlg"}
NO_MASKS = {"learn_masks": False}
# a third of it for curves, whose points are compared with one another only
CURVE = GRAB | {"steps": 250, "decay": 0.89**8}
LAMP_CURVE = LAMP | {"steps": 560, "decay": 0.89 ** (20 / 5.6), "edits": 30}


KNOWN = {"labels": True, "lengths": True}


def setting(
    title: str,
    attack: Mapping[str, Any],
    size: int = 1,
    batches: int = 16,
    client: Mapping[str, Any] = PRACTICAL,
    published: str = "",
    defense: Sequence[Mapping[str, Any]] = (),
    knowledge: Mapping[str, bool] = KNOWN,
    tensors: str = "all",
    data: str = "cola",
    seed: int = 101,
) -> Cell:
    """Return a cell; published is ROUGE-L in the paper (BERT-base, full budget), if any."""
    return Cell(data, size, batches, client, tensors=tensors, seed=seed, defense=defense, published=published,
                title=title, attack=attack, more={"knowledge": dict(knowledge)})  # fmt: skip


def _five(size: int, batches: int, client: dict[str, Any], values: dict[str, str]) -> list[Cell]:
    rows = [("grab, masks learned", GRAB), ("grab, no masks", GRAB | NO_MASKS), ("lamp cos", LAMP), ("tag", TAG)]
    rows += [("dlg", DLG)] if size == 1 else []
    return [setting(title, a, size, batches, client, values.get(title, "")) for title, a in rows]


def order() -> list[Cell]:
    """Practical setting, B = 1: the ordering that Grab's Table 3 prints."""
    values = {
        "grab, masks learned": "78.2", "grab, no masks": "67.3", "lamp cos": "60.1", "tag": "33.4", "dlg": "20.0"
    }  # fmt: skip
    return _five(1, 16, PRACTICAL, values)


def order2() -> list[Cell]:
    """Practical setting, B = 2, at a third of the steps; a curve's beam search grows with B, so LAMP has all of its."""
    rows = {"grab, masks learned": CURVE, "grab, no masks": CURVE | NO_MASKS, "lamp cos": LAMP}
    values = {"grab, masks learned": "69.0"}
    return [setting(title, attack, 2, 8, published=values.get(title, "")) for title, attack in rows.items()]


def benchmark() -> list[Cell]:
    """Dropout off."""
    return _five(1, 16, OFF, {"grab, no masks": "78.3"})[1:4]


def dropout() -> list[Cell]:
    """Rising dropout rates, masks learned and not."""
    return [
        setting(f"dropout {p:g}, {'masks learned' if learn else 'no masks'}", CURVE | {"learn_masks": learn}, 1, 8,
             PRACTICAL | {"dropout_rate": p})
        for p in (0.1, 0.2, 0.3, 0.4) for learn in (True, False)
    ]  # fmt: skip


def pruning() -> list[Cell]:
    """Grab's random pruning, matched on its support and not."""
    values = {0.75: "78.8", 0.9: "80.8", 0.95: "78.0", 0.99: "75.4"}
    return [
        setting(f"pruned {r:g}, counter {'on' if c else 'off'}", CURVE | {"counter": c}, 1, 8, PRACTICAL,
             v if c else "", ({"name": "random-pruning", "rate": r},))
        for r, v in values.items() for c in (True, False)
    ]  # fmt: skip


def noise() -> list[Cell]:
    """Grab's noise on normalized tensors, the guess normalized and not."""
    return [
        setting(f"noise {s:g}, counter {'on' if c else 'off'}", CURVE | {"counter": c}, 1, 8,
             defense=({"name": "normalized-gaussian", "sigma": s},))
        for s in (0.001, 0.005, 0.01, 0.05) for c in (True, False)
    ]  # fmt: skip


def unknown() -> list[Cell]:
    """Labels and lengths known and not, B = 2 and 4 (Grab's Table 5); the longest length is known, as there."""
    values = {
        (2, True, True): "69.0", (2, False, True): "67.4", (2, True, False): "72.3", (2, False, False): "68.9",
        (4, True, True): "62.8", (4, False, True): "55.5", (4, True, False): "66.9", (4, False, False): "63.9",
    }  # fmt: skip
    return [
        setting(f"B = {size}, labels {'known' if y else 'unknown'}, lengths {'known' if n else 'unknown'}", CURVE, size,
             6, published=value, knowledge={"labels": y, "lengths": n, "longest": not n})
        for (size, y, n), value in values.items()
    ]  # fmt: skip


def variants() -> list[Cell]:
    """Ours in order's setting: what is added to Grab's search, one after the other."""
    judged = NO_MASKS | {"moves": True, "refit": 8, "passes": 2}
    ways: dict[str, dict[str, Any]] = {
        "grab, moves, refit, spans": judged | {"pool": "spans"},
        "grab, moves, refit": judged,
        "grab, spans": NO_MASKS | {"pool": "spans"},
        "grab, masks restarted": {"restart_masks": True},
        "grab, texts under 4 fresh masks": {"score_masks": 4},
    }
    return [setting(title, GRAB | how) for title, how in ways.items()]


def own_masks() -> list[Cell]:
    """Do masks help that are learned for each text alone: with them and without, all else equal, on an unseen draw."""
    without = GRAB | NO_MASKS | {"moves": True, "passes": 2, "pool": "spans"}
    # learning masks for 8 texts in 60 steps costs a round as much as 480 of its steps
    ways = {"masks learned for each text": {"refit": 8}, "no masks": {"steps": 1180, "decay": 0.89 ** (20 / 11.8)}}
    return [
        setting(f"dropout {p:g}, {title}", without | how, 1, 16, PRACTICAL | {"dropout_rate": p}, seed=2026)
        for p in (0.1, 0.4) for title, how in ways.items()
    ]  # fmt: skip


PARTS = {
    "all": ("all", "80.0"), "encoder": ("*:*", "80.4"), "layer 1": ("0:*", "58.7"), "q1": ("0:q", "65.0"),
    "k1": ("0:k", "66.0"), "v1": ("0:v", "57.3"), "o1": ("0:o", "57.0"), "f1": ("0:f", "54.0"), "p1": ("0:p", "58.4"),
}  # fmt: skip


def partial() -> list[Cell]:
    """Parts of the gradient, LAMP by cosine, dropout off (partial gradients, EMNLP 2024): B = 1, and three at B = 2."""
    cells = [
        setting(f"lamp cos, {n}", LAMP_CURVE, 1, 8, OFF, value, tensors=part) for n, (part, value) in PARTS.items()
    ]
    pairs = {"all": "58.9", "layer 1": "48.6", "q1": "40.7"}
    return cells + [
        setting(f"lamp cos, B = 2, {n}", LAMP_CURVE, 2, 8, OFF, value, tensors=PARTS[n][0])
        for n, value in pairs.items()
    ]


def prior() -> list[Cell]:
    """LAMP with a language model that judges its edits and without, on an unseen draw."""
    attack = LAMP_CURVE | {"every": 40}  # as many rounds of edits as half of the published steps have
    values = {
        "cola": ("89.6, 51.9", "77.8, 31.5", "66.2, 21.8"), "sst2": ("88.8, 56.8", "82.4, 45.7", "69.5, 32.5"),
        "rt": ("64.7, 16.5", "46.4, 7.6", "35.1, 4.2"),
    }  # fmt: skip
    return [
        setting(f"{data}, B = {size}, {'SmolLM2' if named else 'no'} prior", attack | {"prior": named}, size,
                8 // size, OFF, f"R-1, R-2: {values[data][at]}" if named else "", data=data, seed=19191)
        for at, size in enumerate((1, 2, 4)) for data in values for named in ("smollm2", "")
    ]  # fmt: skip


GROUPS = {
    "order": order, "order2": order2, "benchmark": benchmark, "dropout": dropout, "pruning": pruning, "noise": noise,
    "unknown": unknown, "partial": partial, "prior": prior, "variants": variants, "own-masks": own_masks,
}  # fmt: skip


def interval(values: list[float]) -> str:
    """Return a mean with its 95% bootstrap interval."""
    rng = torch.Generator().manual_seed(0)
    drawn = torch.tensor(values)[torch.randint(len(values), (4000, len(values)), generator=rng)].mean(1)
    low, high = (float(torch.quantile(drawn, q)) for q in (0.025, 0.975))
    return f"{statistics.mean(values):.1f} [{low:.1f}, {high:.1f}]"


def _batches(one: Done) -> tuple[object, ...]:
    """What decides which updates are attacked, but for what is seen of them."""
    return one.cell.data, one.cell.size, one.cell.seed, one.cell.client.get("dropout_rate")


def table(done: Sequence[Done]) -> list[list[str]]:
    """Return means with intervals, and each row's paired difference to the next, where both attack the same batches.

    Rows of the same data and batch size are of as many batches as all of them have.
    """
    done = [one for one in done if one.records]
    rows = []
    for n, one in enumerate(done):
        alike = [other for other in done if _batches(other) == _batches(one)]
        most = min(len(other.records) for other in alike)
        some = one.records[:most]
        scores = {k: [r.scores[k] for r in some] for k in ("rouge1", "rouge2", "rougeL")}
        score = {k: [v for v in values if v is not None] for k, values in scores.items()}  # one word has no pairs
        follows = n + 1 < len(done) and done[n + 1] in alike
        after = [r.scores["rougeL"] for r in done[n + 1].records[:most]] if follows else []
        pairs = [a - b for a, b in zip(score["rougeL"], after, strict=False)]
        spent = statistics.mean([float(r.details.get("gradient_evaluations", 0)) for r in some])
        # a step of the harness attacks is counted once in their records, and three times here
        spent *= 3 if one.cell.attack["name"] in ("tag", "dlg") else 1
        ranks = [r.spectrum.rank for r in some if r.spectrum is not None]
        seen = f"{100 * some[0].share_of_parameters:.1f}%" + (f", {statistics.mean(ranks):.0f}" if ranks else "")
        rows.append([
            one.cell.title, seen, str(most), *(f"{statistics.mean(score[k]):.1f}" for k in ("rouge1", "rouge2")),
            interval(score["rougeL"]), interval(pairs) if pairs else "",
            f"{statistics.mean([r.baseline['rougeL'] for r in some]):.1f}", f"{spent:.0f}",
            f"{statistics.median(r.seconds for r in some):.0f}", one.cell.published,
        ])  # fmt: skip
    return rows


DRAWS = {
    "prior": "Draw 19191, on which nothing was developed",
    "own-masks": "Draw 2026, on which nothing was developed",
}

PROGRAM = Program(
    about=__doc__,
    groups={
        group: lambda given, group=group, make=make: [replace(c, name=f"matching-{group}-{c.title}") for c in make()]
        for group, make in GROUPS.items()
    },
    columns=(
        "attack", "share of parameters, rank", "batches", "ROUGE-1", "ROUGE-2", "ROUGE-L",
        "minus the next row's, paired", "blind R-L", "evaluations", "median s", "published R-L",
    ),
    table=table,
    words=lambda group, given: (
        "MiniLM, CoLA where no other data are named, our scoring, failures count 0; reduced budget, published values "
        "are of BERT-base at full budget (12 blocks, another draw). The attacker has the weights, batch size and "
        "dropout rate, and labels and lengths unless a row says otherwise. "
        f"{DRAWS.get(group, 'The draw is that on which budgets were tried')}. Intervals: 95%, bootstrap over batches."
    ),
    results=Path("benchmarks/results/matching"),
    interleaved=True,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
