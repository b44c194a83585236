"""A client that is replayed on public data, and what is seen of its updates."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradaudit.client.client import Client
from gradaudit.kinds import ByKind
from gradaudit.models.views import View
from gradaudit.selection import Selection


@dataclass(frozen=True)
class ReplayedClient(ABC):
    """What simulations of all kinds of data share.

    Args:
        client: model, training and defenses.
        selection: what the attacker sees.
    """

    client: Client
    selection: Selection

    @cached_property
    def views(self) -> Mapping[str, View]:
        """What is seen of an update, by name."""
        trained = set(self.client.trained())
        return {n: v for n, v in self.selection.views(self.client.model).items() if v.parameter in trained}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors that are seen, by view name."""
        parameters = self.client.model.parameters()
        return {name: tuple(view(parameters[view.parameter]).shape) for name, view in self.views.items()}

    @abstractmethod
    def try_out(self, public: Any, rows: Tensor, size: int, rng: torch.Generator) -> None:
        """Simulate the updates of some public rows, so many an update, for their time alone."""


SIMULATIONS: ByKind[Callable[[Client, Selection], ReplayedClient]] = ByKind("simulation")
"""By kind of data."""
