"""One attack on one observation, timed, its failure kept as a sentence."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from gradaudit.attacks.base import Attack, ModelChangedError
from gradaudit.audit.apart import run_apart
from gradaudit.errors import AuditError, NotSupportedError
from gradaudit.models.base import Model
from gradaudit.registry import from_plugin
from gradaudit.types import Observation, Reconstruction

M = TypeVar("M", bound=Model)
_LEFT_OUT = "is left out: the attack does not declare `textless = True`"
J = TypeVar("J")


@dataclass(frozen=True)
class Attempt(Generic[J]):
    """What came of an attack.

    Args:
        found: what it returned; None where it failed.
        verdict: what the judge says; None where attack or judge failed.
        error: why.
        unsupported: the attack does not support what was to be attacked, and said so.
        seconds: the attack's wall time.
    """

    found: Reconstruction | None
    verdict: J | None
    error: str | None
    unsupported: bool
    seconds: float


def attempt(
    attack: Attack[M], seen: Observation[M], rng: torch.Generator, judged: Callable[[Reconstruction], J]
) -> Attempt[J]:
    """Run an attack, of a plugin in a program of its own, and have its answer judged.

    Only an attack that changed the model stops the audit.

    Args:
        attack: the attack.
        seen: what it may see.
        rng: its random stream.
        judged: compares with the truth.

    Raises:
        ModelChangedError: every later batch would be attacked on another model.
    """
    found, verdict, error, unsupported = None, None, None, False
    began = time.perf_counter()
    try:
        found = run_apart(attack, seen, rng) if from_plugin(type(attack)) else attack(seen, rng)
        seconds = time.perf_counter() - began
        verdict = judged(found)
    except AuditError as problem:
        error = str(problem) if attack.shares_no_text() else _unread(problem)
        unsupported = isinstance(problem, NotSupportedError)
        seconds = time.perf_counter() - began
    except ModelChangedError:
        raise
    except Exception as problem:  # a failing batch is a record; the others go on
        error = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
        error = error if attack.shares_no_text() else _unread(problem)
        seconds = time.perf_counter() - began
    return Attempt(found, verdict, error, unsupported, seconds)


def shareable(attack: Attack[M], found: Reconstruction | None) -> Reconstruction | None:
    """Return a reconstruction whose notes and details may stand in a record: none where nothing is promised."""
    if found is None or attack.shares_no_text() or not (found.notes or found.details):
        return found
    return replace(found, notes=(f"notes and details of '{attack.name}' {_LEFT_OUT}",), details={})


def _unread(problem: Exception) -> str:
    """Return the kind of an error whose text may hold what was recovered."""
    ours = type(problem).__module__ in ("builtins", "gradaudit.errors")  # a class may be named by chance as well
    return f"{type(problem).__name__ if ours else 'an error of its own'}; its text {_LEFT_OUT}"
