"""Auto: a fixed suite of attacks under a budget of time; what all of them read together."""

import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradaudit.attacks.base import SUREST, Attack, ModelChangedError, no_more_than
from gradaudit.attacks.blind import Blind
from gradaudit.attacks.dager import Dager
from gradaudit.attacks.decode import Decode
from gradaudit.attacks.exchange import Exchange
from gradaudit.attacks.gigip import GenerativePrior
from gradaudit.attacks.grab import Grab
from gradaudit.attacks.ig import InvertingGradients
from gradaudit.attacks.lamp import Lamp
from gradaudit.attacks.tag import Tag
from gradaudit.defense_traits import Trait
from gradaudit.errors import AuditError, BadInputError, BrokenDownError, NotSupportedError, unknown_name
from gradaudit.leakage.explained import explained
from gradaudit.models.base import Model
from gradaudit.progress import StoppedError, TimeIsOverError, within
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction

SUITE: dict[str, type[Attack[Any]]] = {
    cls.name: cls for cls in (Decode, Dager, Exchange, Tag, Lamp, Grab, InvertingGradients, GenerativePrior)
}
"""At their own defaults, the cheapest first. A change of it is a change of every result."""
_WHOLE = 1 - 1e-4
"""What explains so much of an update is the batch; `exchange` stops there too."""
_TRIED_LENGTH = 16
"""Words of the guess whose gradient is timed, where nobody knows the length."""


@dataclass(frozen=True)
class _Answer:
    """What one attack of the suite gave, and how much of the update it explains (None: not known)."""

    name: str
    found: Reconstruction
    cosine: float | None

    def sure(self, certificate: str) -> int:
        return (self.found.certificates or ()).count(certificate)

    @property
    def rank(self) -> tuple[float, ...]:
        """The higher, the worse for the client."""
        words = self.found.words or ()
        told = -1.0 if self.cosine is None else self.cosine
        return (
            told,
            self.sure("proven"),
            self.sure("likely"),
            sum(w.certain for w in words),
            len(words),
            self.found.count,
        )


@register
@dataclass(frozen=True)
class Auto(Attack[Model]):
    """Try a fixed suite of attacks, the cheapest first, within a time, and return the worst that they find together.

    Where dropout is on, attacks that reckon with it go first. The first that can read the update is always tried; one
    that cannot, or would not end within the time and tells nothing before its end, is named with the reason. The suite
    stops early where the whole batch is proven, or what was read explains the whole update. What several attacks read
    is put together, the surest first.

    Raises:
        BadInputError: an attack that is not in the suite, or no time.
        StoppedError: Ctrl-C, with what was read until then.
    """

    name: ClassVar[str] = "auto"
    source: ClassVar[str] = "ours: an ensemble without parameters, as AutoAttack (Croce and Hein, ICML 2020) for images"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "causal-lm", "image-classification")
    handles: ClassVar[frozenset[Trait]] = frozenset[Trait]().union(*(cls.handles for cls in SUITE.values()))
    models_dropout: ClassVar[bool] = True
    budget: float = hyper(120.0, "time for a batch; an attack that runs when it ends is ended", unit="s", source="ours")
    suite: tuple[str, ...] = hyper(
        tuple(SUITE), "attacks that may be tried, each at its own defaults", source="ours: the strongest of each kind"
    )

    def __post_init__(self) -> None:
        for name in self.suite:
            if name not in SUITE:
                raise unknown_name("attack of the suite", name, SUITE)
        if not (self.suite and self.budget > 0):
            raise BadInputError("attack 'auto': it needs an attack in its suite and a budget above 0 s")

    @property
    def seconds_at_most(self) -> float:
        return self.budget

    def reckons_with(self, defense: str, model: Model | None = None, batch_size: int | None = None) -> bool:
        return any(one.reckons_with(defense, model, batch_size) for one in self._members())

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return sum(one.gradient_evaluations(batch_size, tokens) for one in self._members())

    def run(self, seen: Observation[Model], rng: torch.Generator) -> Reconstruction:
        end = time.monotonic() + self.budget
        # a seed each, drawn before any is tried: an attack answers the same whichever others had time
        seeds = dict(zip(SUITE, torch.randint(2**62, (len(SUITE),), generator=rng).tolist(), strict=True))
        answers: list[_Answer] = []
        said: list[str] = []
        broken, refused, once, started = 0, 0, None, False
        order, size, tokens = self._ordered(seen), seen.knowledge.batch_size or 1, _tokens(seen)
        for at, attack in enumerate(order, 1):
            if answers and _is_whole(seen, answers):
                said.append(f"{attack.name} (not needed)")
                continue
            if (why := _unreadable(attack, seen)) is not None:
                refused += 1
                said.append(f"{attack.name} ({why})")
                continue
            left = share = end - time.monotonic()
            dear = attack.gradient_evaluations(size, tokens)
            if dear > 1 and started:  # a busy machine's gradients tell little: one attack is tried whatever they say
                once = once or _seconds_of_a_gradient(seen)
                if attack.anytime and left > 0:
                    later = [one.gradient_evaluations(size, tokens) for one in order[at:] if not _unreadable(one, seen)]
                    share = left / 2 if any(once * other <= left / 2 for other in later) else left
                elif left <= 0 or once * dear > left:
                    said.append(f"{attack.name} (not tried: more than the time that was left)")
                    continue
            started = True
            try:
                with within(share):
                    found = attack(seen, torch.Generator().manual_seed(seeds[attack.name]))
            except TimeIsOverError as over:
                read = ""
                if over.found is not None:
                    answers.append(_Answer(attack.name, over.found, explained(seen, over.found)))
                    read = f": {_read(over.found)}"
                said.append(f"{attack.name} (ended by the budget{read})")
                continue
            except AuditError as error:
                refused += 1
                said.append(f"{attack.name} ({error})")
                continue
            except KeyboardInterrupt as stop:
                if isinstance(stop, StoppedError):
                    answers.append(_Answer(attack.name, stop.found, explained(seen, stop.found)))
                if not answers:
                    raise
                told = f"auto tried: {'; '.join([*said, f'{attack.name} (stopped with Ctrl-C)'])}"
                raise StoppedError(_together(answers, seen.knowledge.batch_size, told)) from None
            except (ModelChangedError, MemoryError):
                raise
            except BaseException as error:  # one that breaks down takes nothing from the others
                if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's
                    raise
                broken += 1
                said.append(f"{attack.name} (broke down: {type(error).__name__})")
                continue
            answers.append(_Answer(attack.name, found, explained(seen, found)))
            said.append(f"{attack.name} ({_read(found)})")
        told = f"auto tried: {'; '.join(said)}"
        if not answers and refused + broken == len(said):
            raise (BrokenDownError if broken else NotSupportedError)(f"attack 'auto' has none that reads this; {told}")
        return _together(answers, seen.knowledge.batch_size, told)

    def _guessed_back(self, seen: Observation[Model], found: Reconstruction) -> Reconstruction:
        return found  # each attack of the suite did

    def _members(self) -> list[Attack[Any]]:
        return [cls() for name, cls in SUITE.items() if name in self.suite]

    def _ordered(self, seen: Observation[Model]) -> list[Attack[Any]]:
        """Return the attacks for such a model, those first that reckon with dropout where it is on."""
        some = [one for one in self._members() if one.takes(seen.model.spec.task)]
        return sorted(some, key=lambda one: bool(seen.knowledge.dropout) and not one.models_dropout)


def _unreadable(attack: Attack[Any], seen: Observation[Model]) -> str | None:
    """Return why an attack is not run, as far as it is known beforehand; None for no reason."""
    known = seen.knowledge
    missing = [need for need in attack.needs if getattr(known, need) is None]
    if missing or ("public" in attack.needs and seen.public is None):
        return f"must be given {', '.join(missing) or 'public'}"
    for one in known.defenses or ():
        if not attack.reckons_with(str(one.get("name")), seen.model, known.batch_size):
            return f"cannot read through {one.get('name')}"
    return None


def _tokens(seen: Observation[Model]) -> int:
    known = seen.knowledge
    return sum(known.lengths or ()) or (known.batch_size or 1) * (known.longest or _TRIED_LENGTH)


def _seconds_of_a_gradient(seen: Observation[Model]) -> float:
    """Return how long one gradient of a guess takes on this machine, in seconds; 0 where none can be computed."""
    guess = Blind(length=max(1, _tokens(seen) // (seen.knowledge.batch_size or 1)))(seen, torch.Generator())
    guess = replace(guess, labels=(0,) * guess.count)
    times = []
    for _ in range(2):  # the first warms up
        began = time.perf_counter()
        if explained(seen, guess) is None:
            return 0.0
        times.append(time.perf_counter() - began)
    return min(times)


def _is_whole(seen: Observation[Model], answers: list[_Answer]) -> bool:
    """Return whether nothing is left to find: every sentence is proven, or the update is explained."""
    size = seen.knowledge.batch_size
    return size is not None and any(
        a.found.count == size and (a.sure("proven") == size or (a.cosine or 0) > _WHOLE) for a in answers
    )


def _read(found: Reconstruction) -> str:
    what = "image" if found.images is not None else "sentence"
    said = [f"{found.count} {what}{'s' * (found.count != 1)}"]
    said += [f"{n} {c}" for c in SUREST[:2] if (n := (found.certificates or ()).count(c))]
    if found.words:
        said.append(f"{len(found.words)} words")
    return ", ".join(said) if found.count or found.words else ": ".join(("nothing", *found.notes[:1]))


def _together(answers: list[_Answer], size: int | None, told: str) -> Reconstruction:
    """Return the worst answer, with what others proved, or with what they read in the place of what it lacks."""
    if not answers:
        return Reconstruction(notes=(told,), details={"tried": 0})
    ranked = sorted(answers, key=lambda a: a.rank, reverse=True)
    worst = ranked[0]
    found = worst.found
    if found.images is None:
        found = _filled(ranked, size)
    words = max((a.found.words or () for a in answers), key=lambda w: (sum(x.certain for x in w), len(w)))
    details = dict(worst.found.details) | {"tried": len(answers), "read_by": worst.name}
    if worst.cosine is not None:
        details["explained"] = round(worst.cosine, 6)
    notes = (*worst.found.notes, told)
    return replace(found, notes=notes, details=details, words=words or worst.found.words, by=worst.name)


def _filled(ranked: list[_Answer], size: int | None) -> Reconstruction:
    """Return the first answer's sentences, those that others proved, and what they have for places that are empty."""
    worst = ranked[0].found
    rows = list(zip(worst.sequences, worst.certificates or ("guess",) * worst.count, strict=True))
    for other in ranked[1:]:
        certificates, same = other.found.certificates or ("guess",) * other.found.count, set[int]()
        for sentence, sure in zip(other.found.sequences, certificates, strict=True):
            at = next((n for n, (own, _) in enumerate(rows) if own == sentence and n not in same), None)
            if at is not None:
                same.add(at)
                rows[at] = (sentence, min(rows[at][1], sure, key=SUREST.index))
            elif sure == "proven" or (size is not None and len(rows) < size):
                rows.append((sentence, sure))
    if len(rows) == worst.count:  # its own: labels stay
        certain = any(sure != "guess" for _, sure in rows)
        return replace(worst, certificates=tuple(s for _, s in rows) if certain else worst.certificates)
    joined = Reconstruction(tuple(s for s, _ in rows), certificates=tuple(c for _, c in rows))
    return replace(no_more_than(size, joined), notes=())
