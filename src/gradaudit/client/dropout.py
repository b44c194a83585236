"""Dropout while a client trains: masks from one stream of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from gradaudit.models.base import Model
from gradaudit.streams import global_stream


class DropoutOn(AbstractContextManager[None]):
    """Training mode with the masks drawn from one stream; evaluation mode after."""

    def __init__(self, model: Model, rng: torch.Generator, rate: float | None) -> None:
        self._random = global_stream(rng, model.device)
        self._mode = model.training_mode(rate)

    def __enter__(self) -> None:
        self._random.__enter__()
        self._mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(None, None, None)
        self._random.__exit__(None, None, None)
