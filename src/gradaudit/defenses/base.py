"""What a defense is: a frozen dataclass that acts at one place of the client's work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor


class UpdateDefense(ABC):
    """A defense on the finished update, before it leaves the client.

    Subclasses are frozen dataclasses; their fields are the defense's parameters and are recorded in the update.
    """

    kind: ClassVar[str] = "defense"
    name: ClassVar[str]
    acts_on: ClassVar[str] = "update"

    @abstractmethod
    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        """Return the defended tensors: same names, shapes and dtypes; the input is left as it was.

        Args:
            tensors: the update by parameter name.
            rng: the defense's own random stream (on the CPU).
        """
