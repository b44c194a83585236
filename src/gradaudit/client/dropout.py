"""Dropout while a client trains: masks from one stream of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradaudit.models.base import Model
from gradaudit.streams import global_stream


@contextmanager
def dropout_on(model: Model, rng: torch.Generator, rate: float | None) -> Iterator[None]:
    """Training mode with the masks drawn from one stream; evaluation mode after."""
    with global_stream(rng, model.device), model.training_mode(rate):
        yield
