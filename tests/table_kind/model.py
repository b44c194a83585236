"""A linear classifier of rows of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradaudit.models.base import Model
from gradaudit.models.spec import TASKS, ModelSpec
from gradaudit.models.state import fingerprint_of, remember
from gradaudit.models.views import View
from gradaudit.streams import draw_seed, stream

TASK = "table-classification"
TASKS[TASK] = "table"


class Linear(Model):
    def __init__(self, spec: ModelSpec, columns: int) -> None:
        self.spec, self.width, self.depth = spec, columns, 0
        with torch.random.fork_rng():
            torch.manual_seed(draw_seed(stream(spec.seed, "linear")))
            self.module = nn.Linear(columns, spec.labels)

    @property
    def device(self) -> torch.device:
        return self.module.weight.device

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())

    def untrained(self) -> tuple[str, ...]:
        return ()

    def views(self, layer: int, role: str) -> list[View]:
        return []

    def group(self, name: str) -> list[str]:
        return ["weight", "bias"] if name == "head" else []

    @contextmanager
    def training_mode(self, rate: float | None = None) -> Iterator[None]:
        yield

    def dropout_rate(self) -> float:
        return 0.0

    def weights_changed(self) -> None:
        pass

    def remember(self) -> Callable[[], bool]:
        return remember(self.module)

    def fingerprint(self) -> str:
        return fingerprint_of(self.parameters())

    def loss(self, values: Tensor, labels: Tensor, params: Mapping[str, Tensor] | None = None) -> Tensor:
        used = self.parameters() if params is None else params
        return nn.functional.cross_entropy(values @ used["weight"].T + used["bias"], labels)
