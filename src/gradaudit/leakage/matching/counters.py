"""What matching measures in place of plain differences when the attacker knows of a defense."""

from gradaudit.defense_traits import Trait, all_traits
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.matching.distances import Distance, Normalized, OnSupport, WrongSigns
from gradaudit.types import Observation

TEXT_COUNTERED: frozenset[Trait] = frozenset({"unit norm", "support", "signs"})
"""Traits that `countered` reckons with."""


def countered(distance: Distance, seen: Observation, attack: str) -> Distance:
    """Return what to measure under the defenses that the attacker was told of; without any the distance itself.

    Signs: a hinge on wrong ones. Pruning: only what was sent. Noise on unit-norm tensors: the guess's are scaled too.

    Args:
        distance: of an update without defenses.
        seen: the observation.
        attack: its name, for messages.

    Raises:
        NotSupportedError: noise on unit-norm tensors of which only parts are seen.

    Source: LTI, section 4 (baselines under defenses); Grab, sections 5.4 and 5.5.
    """
    traits = all_traits(seen.knowledge.defenses)
    if "signs" in traits:
        return WrongSigns(distance.l1)
    inner = OnSupport(distance) if "support" in traits else distance
    if "unit norm" not in traits:
        return inner
    must_be_whole(seen, attack)
    return Normalized(inner)


def must_be_whole(seen: Observation, attack: str) -> None:
    """Refuse to scale a guess's tensors to unit norm where the client scaled matrices of which only parts are seen.

    Args:
        seen: the observation.
        attack: its name, for the message.

    Raises:
        NotSupportedError: some tensor seen is a part of a matrix.
    """
    if any(view.rows is not None for view in seen.views.values()):
        raise NotSupportedError(
            f"attack '{attack}' cannot normalize a part of a matrix as the client did the whole: GPT-2's q, k and v "
            "are thirds of one; select all of it, or set counter = false"
        )
