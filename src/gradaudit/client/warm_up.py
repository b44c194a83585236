"""Adapters as they are after some rounds: a few steps on text that no audit is about."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gradaudit.client.examples import examples_of
from gradaudit.errors import BadInputError
from gradaudit.models.local_steps import Parameters, by_optimizer, local_steps
from gradaudit.models.transformers import TransformersModel
from gradaudit.streams import stream
from gradaudit.types import Batch

_RATE = 1e-3
"""Learning rate of the steps: peft's examples train adapters at 1e-4 to 1e-3."""
_SIZE = 8
"""Sentences a step."""


def other_rows(rows: int, audited: Iterable[Sequence[int]], rng: torch.Generator) -> list[int]:
    """Return the rows that are in no audited batch, in a drawn order.

    Args:
        rows: in the data.
        audited: numbers of the rows of each audited batch.
        rng: draws the order.
    """
    kept = {number for batch in audited for number in batch}
    others = [number for number in range(rows) if number not in kept]
    return [others[n] for n in torch.randperm(len(others), generator=rng)]


def warm_up_rows(seed: int, rows: int, audited: Sequence[Sequence[int]], steps: int) -> Iterator[list[int]]:
    """Yield the rows of each step, of no audited batch; over again where there are few.

    Args:
        seed: the case's.
        rows: in the data.
        audited: numbers of the rows of each audited batch.
        steps: how many.

    Raises:
        BadInputError: every row is in an audited batch.
    """
    others = other_rows(rows, audited, stream(seed, "warm-up"))
    if not others:
        raise BadInputError("[lora] warmup needs rows that are in no audited batch: fewer batches, or more data")
    for step in range(steps):
        yield [others[(step * _SIZE + i) % len(others)] for i in range(min(_SIZE, len(others)))]


def warm_up(model: TransformersModel, batches: Iterable[Batch]) -> None:
    """Train the adapters a step on each batch, in place, dropout off.

    Args:
        model: a model with adapters.
        batches: of public text.
    """
    fixed = set(model.untrained())
    trained = {name: p for name, p in model.parameters().items() if name not in fixed}

    def gradient(params: Parameters, batch: Batch, step: int) -> dict[str, Tensor | None]:
        loss = examples_of(model, batch, "right").loss(torch.arange(len(batch)), None)
        return dict(zip(params, torch.autograd.grad(loss, list(params.values()), allow_unused=True), strict=True))

    local_steps(trained, batches, gradient, by_optimizer(torch.optim.AdamW(trained.values(), lr=_RATE)))
    for p in trained.values():
        p.grad = None
    model.weights_changed()
