"""What an attacker who is told of a defense knows of what it does to an update: traits, a law, and nothing of how.

A defense says its traits (`defenses.base.Defense.traits`), an attack those that it handles (`Attack.handles`). No other
file names a defense: a new one is countered, refused or flagged by what it says of itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from torch import Tensor

from gradaudit.registry import build, known

Trait = Literal[
    "zero mean",
    "signs",
    "support",
    "unit norm",
    "scaled",
    "examples clipped",
    "one example clipped",
    "remembers",
    "stand-ins",
    "other",
]
"""zero mean: adds to each coordinate what is 0 in the mean. signs: sends them alone. support: sends zeros in place of
coordinates. unit norm: scales each tensor to norm 1. scaled: makes the whole shorter. examples clipped: scales each
example's gradient by itself; one example clipped: the same in a batch of one, where it is the whole. remembers: adds
what earlier rounds held back. stand-ins: trains on other words. other: anything else, which no attack handles."""
TRAITS: tuple[Trait, ...] = get_args(Trait)
ANYTHING: frozenset[Trait] = frozenset(TRAITS)
"""Of attacks that learn through the defense, or look at no update."""
OF_MEANS: frozenset[Trait] = frozenset({"zero mean", "examples clipped", "one example clipped", "stand-ins"})
"""Traits that the mean of several clients' updates has as well, each of which was defended by itself."""

Law = Literal["gaussian", "signs", "largest", "support"]
"""How likely an update is: noise of `sigma` (of each tensor's size where `relative`), signs of the true one, its
largest coordinates, or some of them."""


def _defense(told: Mapping[str, Any] | str) -> Any:
    name = told if isinstance(told, str) else str(told.get("name"))
    return known("defense").get(name)


def traits_of(told: Mapping[str, Any] | str, batch_size: int | None = None) -> frozenset[Trait]:
    """Return the traits of a defense; none of one that an update shows by what is absent from it.

    Args:
        told: its description, or its name.
        batch_size: examples of the batch; None where they are not known.
    """
    defense = _defense(told)
    if defense is None:
        return frozenset({"other"})
    found: frozenset[Trait] = defense.traits
    if batch_size == 1 and "examples clipped" in found:
        return found - {"examples clipped"} | {"one example clipped"}
    return found


def law_of(told: Mapping[str, Any]) -> Law | None:
    """Return the law of what a defense sends; None where nobody wrote it down."""
    found: Law | None = getattr(_defense(told), "law", None)
    return found


def deviation_told(
    told: Sequence[Mapping[str, Any]] | None, sent: Tensor, examples: int | None = None, changed: bool = False
) -> float | None:
    """Return the standard deviation of the noise in each entry of a tensor, as what was told of it has it.

    Args:
        told: the defenses, in order; what went before the noise may only scale.
        sent: what they made of the tensor.
        examples: of the batch; None where they are not known.
        changed: a weight change was sent; noise on the gradients that made it has no size in it.

    Returns:
        None where no noise was told, or its size does not follow.
    """
    if not told or all_traits(told[:-1]) - {"scaled"} or _defense(told[-1]) is None:
        return None
    last = build("defense", str(told[-1]["name"]), {k: v for k, v in told[-1].items() if k != "name"})
    size: float | None = None if changed and last.acts_on != "update" else last.deviation(sent, examples)
    return size


def all_traits(told: Iterable[Mapping[str, Any]] | None) -> frozenset[Trait]:
    """Return the traits of all defenses that an attacker was told of; none where he was told of none."""
    return frozenset(trait for one in told or () for trait in traits_of(one))


def with_trait(told: Iterable[Mapping[str, Any]] | None, trait: Trait) -> Mapping[str, Any] | None:
    """Return the first defense with a trait; None where there is none."""
    return next((one for one in told or () if trait in traits_of(one)), None)
