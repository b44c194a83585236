"""What a case's own defenses promise for one update, whatever attack comes; apart from what attacks recover."""

import math
from collections.abc import Sequence

from gradaudit.accounting.check import LITTLE, number
from gradaudit.accounting.epsilon import gaussian_epsilon
from gradaudit.defenses.base import Defense, ExampleDefense, Noise
from gradaudit.errors import BadInputError

DELTA = 1e-5
"""Failure probability at which epsilon is said."""


def promised(defenses: Sequence[Defense], steps: int, tensors: int) -> str | None:
    """Return, in a sentence, the guarantee of one update that went through defenses.

    Args:
        defenses: in order.
        steps: the client's local steps; 1 for one gradient.
        tensors: how many the client sends.

    Returns:
        None where there is no defense.

    The last noise decides; what follows it works on what is public already. For a whole training, with its rounds and
    its sampling, there is `gradaudit claims`.
    """
    if not defenses:
        return None
    bound: float | None = None
    noises: list[tuple[Defense, Noise]] = []
    for defense in defenses:
        added = defense.noise(bound, tensors, steps)
        if added is not None:
            noises.append((defense, added))
        bound = defense.bound(bound, tensors)
    if not noises:
        return "Nothing: none of these defenses adds noise to what is sent, so it is a function of the data alone."
    # examples are clipped and noised first of all: noise behind it takes nothing of that away
    noise = next((added for defense, added in noises if isinstance(defense, ExampleDefense)), noises[-1][1])
    if noise.without is not None:
        return f"Nothing: {noise.without}."
    if noise.sensitivity is None:
        return "Nothing: the noise stands behind no bound on the update, so one sentence can change it by any amount."
    try:
        found = float(gaussian_epsilon(noise.multiplier, noise.sensitivity, DELTA, noise.steps))
    except BadInputError as error:
        return f"Not computed: {error}."
    what = f"epsilon {number(found)} for {noise.whose}, replaced by another, in this one update (delta {DELTA:g})"
    if not math.isfinite(found):
        return "Nothing that can be said: the noise is too small for any finite epsilon."
    if found > LITTLE:
        return f"Little: {what}; odds may change by a factor of e^{number(found)}. Rounds add up."
    return f"{what[0].upper()}{what[1:]}. Rounds add up."
