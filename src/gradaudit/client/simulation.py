"""A client that is replayed on public data, and what is seen of its updates."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gradaudit.client.client import Client
from gradaudit.models.views import View
from gradaudit.selection import Selection


@dataclass(frozen=True)
class ReplayedClient(ABC):
    """What simulations of text and of images share.

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
