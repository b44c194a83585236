"""A row is the gradient of a class's weights over that of its bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gradaudit.attacks.base import Attack
from gradaudit.registry import register
from gradaudit.types import Observation, Reconstruction
from table_kind.model import TASK


@register
@dataclass(frozen=True)
class ReadRow(Attack[Any]):
    """Read one row off a linear layer's gradient."""

    name: ClassVar[str] = "read-row"
    source: ClassVar[str] = "Phong et al., 2017, section 3"
    tasks: ClassVar[tuple[str, ...]] = (TASK,)

    def run(self, seen: Observation[Any], rng: torch.Generator) -> Reconstruction:
        slope = seen.tensors["bias"]
        of = int(slope.abs().argmax())
        return Reconstruction(images=(seen.tensors["weight"][of] / slope[of])[None])
