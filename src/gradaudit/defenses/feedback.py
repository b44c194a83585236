"""Error feedback: what compression leaves out of a round's update is added to the next one's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.defense_traits import Trait
from gradaudit.defenses.base import UpdateDefense
from gradaudit.errors import BadInputError
from gradaudit.registry import hyper, register


@register
@dataclass(frozen=True)
class ErrorFeedback(UpdateDefense):
    """Add what the defenses named behind it left out of earlier rounds' updates, before they act on this one's.

    With u = g + e they send C(u), and e becomes u - C(u). What is held back is the client's state (`Client.held`), and
    not the defense's; by itself, as in a first round, it changes nothing.

    Raises:
        BadInputError: a number of rounds below 0.
    """

    name: ClassVar[str] = "error-feedback"
    traits: ClassVar[frozenset[Trait]] = frozenset({"remembers"})
    deterministic: ClassVar[bool] = True
    rounds: int = hyper(
        8,
        "rounds before the attacked one, each on other rows of the client's data; the weights stay as they are",
        source="ours: sparsified SGD with memory (Stich et al., 2018, algorithm 1) from its description",
    )

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise BadInputError(f"defense 'error-feedback': rounds must be at least 0, got {self.rounds}")

    def on_many(self, values: Tensor, rng: torch.Generator) -> Tensor:
        return values.clone()

    def on_mean(self, mean: Mapping[str, Tensor], clients: int, rng: torch.Generator) -> dict[str, Tensor]:
        return dict(mean)
