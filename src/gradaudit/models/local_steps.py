"""Local training, one loop for all who train or follow a training: clients, adapters' warm-up, attacks that replay."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import TypeVar

import torch
from torch import Tensor

from gradaudit.types import LocalTraining

Parameters = dict[str, Tensor]
"""By name."""
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What inputs and weights of a product are rounded to under autocast, by the precision of a training."""
WEIGHTS = {"bf16-weights": torch.bfloat16}
"""The type of weights, gradients and the optimizer's state, where it is not float32."""
_SMALLEST = 1e-30
"""Square of a gradient below which a root is flat: at 0 its slope is no number. The root is far below eps."""
_CLIPPED = 1e-6
"""What torch adds to a norm before it divides by it."""
R = TypeVar("R")


def local_steps(
    local: Parameters,
    batches: Iterable[R],
    gradient: Callable[[Parameters, R, int], Mapping[str, Tensor | None]],
    step: Callable[[Parameters, Mapping[str, Tensor | None]], Parameters],
) -> Parameters:
    """Return the parameters after a step on each batch.

    Args:
        local: the parameters before.
        batches: what each step is taken on.
        gradient: by the parameters, of a batch, at a step counted from 0; None where a parameter has no part in it.
        step: from parameters and their gradient to the next ones.
    """
    for number, rows in enumerate(batches):
        local = step(local, gradient(local, rows, number))
    return local


def in_order(how: LocalTraining, size: int, device: torch.device | None = None) -> Iterator[Tensor]:
    """Yield the rows of each step's minibatch, in the order in which the batch has them."""
    for _ in range(how.epochs):
        yield from torch.split(torch.arange(size, device=device), how.minibatch or size)


def in_groups(batches: Iterable[R], count: int) -> Iterator[tuple[R, ...]]:
    """Yield so many batches together, the last ones fewer where they run out."""
    every = iter(batches)
    while some := tuple(islice(every, count)):
        yield some


def by_optimizer(
    optimizer: torch.optim.Optimizer, rates: Sequence[float] | None = None, clip: float | None = None
) -> Callable[[Parameters, Mapping[str, Tensor | None]], Parameters]:
    """Return the step of an optimizer, which changes the parameters in place.

    Args:
        optimizer: of the parameters.
        rates: learning rate of each step; None leaves the optimizer's own.
        clip: largest norm of a step's gradient; None does not clip.
    """
    to_come = iter(rates or ())

    def step(local: Parameters, gradient: Mapping[str, Tensor | None]) -> Parameters:
        for name, p in local.items():
            p.grad = gradient[name]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(local.values(), clip)
        if rates is not None:
            optimizer.param_groups[0]["lr"] = next(to_come)
        optimizer.step()
        return local

    return step


def optimizer_of(how: LocalTraining, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of a client that trains locally."""
    rate, decay = how.learning_rate, how.weight_decay
    if how.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=how.momentum, weight_decay=decay)
    kind = torch.optim.Adam if how.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=rate, betas=how.betas, eps=how.eps, weight_decay=decay)


def by_rule(how: LocalTraining, steps: int) -> Callable[[Parameters, Mapping[str, Tensor | None]], Parameters]:
    """Return the optimizer's step that leaves the parameters as they are: it can be differentiated.

    Args:
        how: the training, from a fresh state.
        steps: taken in all; schedules count them.
    """
    rates, number = how.rates(steps), count()
    adapts, (b1, b2) = how.optimizer in ("adam", "adamw"), how.betas
    decoupled = how.optimizer == "adamw"
    first: Parameters = {}
    second: Parameters = {}

    def moved(name: str, p: Tensor, g: Tensor, at: int) -> Tensor:
        if how.weight_decay and not decoupled:
            g = g + how.weight_decay * p
        if not adapts:
            first[name] = g = how.momentum * first[name] + g if how.momentum and at else g
            return p - rates[at] * g
        first[name] = (1 - b1) * g + (b1 * first[name] if at else 0)
        second[name] = (1 - b2) * g.square() + (b2 * second[name] if at else 0)
        size = (second[name] / (1 - b2 ** (at + 1)) + _SMALLEST).sqrt() + how.eps
        kept = p * (1 - rates[at] * how.weight_decay) if decoupled else p
        return kept - rates[at] / (1 - b1 ** (at + 1)) * first[name] / size

    def step(local: Parameters, gradient: Mapping[str, Tensor | None]) -> Parameters:
        at, there = next(number), {name: g for name, g in gradient.items() if g is not None}
        if how.clip_norm is not None:
            norm = (sum(g.square().sum() for g in there.values()) + _SMALLEST) ** 0.5
            factor = (how.clip_norm / (norm + _CLIPPED)).clamp(max=1.0)
            there = {name: g * factor for name, g in there.items()}
        return {name: moved(name, p, there[name], at) if name in there else p for name, p in local.items()}

    return step
