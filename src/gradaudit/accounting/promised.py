"""What a case's own defenses promise for one update, whatever attack comes; apart from what attacks recover."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradaudit.accounting.check import LITTLE, number
from gradaudit.accounting.epsilon import gaussian_epsilon
from gradaudit.errors import BadInputError

DELTA = 1e-5
"""Failure probability at which epsilon is said."""
_SHRINKING = frozenset({"topk", "random-pruning", "freeze", "dropout"})
"""Defenses that make no update longer: a bound that held before them holds behind them."""


def promised(defenses: Sequence[Mapping[str, Any]], steps: int, tensors: int) -> str | None:
    """Return, in a sentence, the guarantee of one update that went through defenses.

    Args:
        defenses: name and parameters of each, in order, as an update records them.
        steps: the client's local steps; 1 for one gradient.
        tensors: how many the client sends.

    Returns:
        None where there is no defense.

    The last noise decides; what follows it works on what is public already. For a whole training, with its rounds and
    its sampling, there is `gradaudit claims`.
    """
    if not defenses:
        return None
    noises = [
        n for n, d in enumerate(defenses) if d["name"] in ("dp-sgd", "gaussian", "normalized-gaussian", "laplace")
    ]
    if not noises:
        return "Nothing: none of these defenses adds noise to what is sent, so it is a function of the data alone."
    # examples are clipped and noised first of all: noise behind it takes nothing of that away
    guard = next((d for d in defenses if d["name"] == "dp-sgd"), None)
    if guard is not None:
        if not guard["noise_multiplier"]:
            return "Nothing: gradients are clipped, and no noise is added to them."
        # no gain by sampling: which sentences are in the update is what is asked; one replaced moves a sum by 2 C
        return _said(lambda: gaussian_epsilon(guard["noise_multiplier"], 2.0, DELTA, steps), "one sentence")
    place = noises[-1]
    noise = defenses[place]
    if noise["name"] == "laplace":
        return "Nothing: Laplace noise without a bound on each coordinate has no epsilon."
    if noise["name"] == "normalized-gaussian":
        bound: float | None = math.sqrt(tensors)
    else:
        bound = None if noise.get("relative") else _bound(defenses[:place], tensors)
    if bound is None:
        return "Nothing: the noise stands behind no bound on the update, so one sentence can change it by any amount."
    size = noise["sigma"]
    return _said(lambda: gaussian_epsilon(size, 2 * bound, DELTA), "the whole update (one sentence has no more)")


def _bound(before: Sequence[Mapping[str, Any]], tensors: int) -> float | None:
    """Return the largest norm of an update behind some defenses; None where there is none."""
    for defense in reversed(before):
        if defense["name"] == "clip":
            return float(defense["norm"]) * (math.sqrt(tensors) if defense["per_tensor"] else 1.0)
        if defense["name"] not in _SHRINKING:
            return None
    return None


def _said(epsilon: Any, whose: str) -> str:
    try:
        found = float(epsilon())
    except BadInputError as error:
        return f"Not computed: {error}."
    what = f"epsilon {number(found)} for {whose}, replaced by another, in this one update (delta {DELTA:g})"
    if not math.isfinite(found):
        return "Nothing that can be said: the noise is too small for any finite epsilon."
    if found > LITTLE:
        return f"Little: {what}; odds may change by a factor of e^{number(found)}. Rounds add up."
    return f"{what[0].upper()}{what[1:]}. Rounds add up."
