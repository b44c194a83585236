"""DP-SGD: each example's gradient clipped, noise on their sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradaudit.defense_traits import Trait
from gradaudit.defenses.base import ExampleDefense, Noise, above_zero
from gradaudit.errors import BadInputError
from gradaudit.registry import hyper, register
from gradaudit.streams import draw_seed


@register
@dataclass(frozen=True)
class DPSGD(ExampleDefense):
    """Clip each example's gradient in L2 norm, add Gaussian noise to the sum, divide by the expected batch (Opacus).

    What is sent is the clipped and noisy gradient itself, or the weight change of steps along it. What epsilon it
    supports depends on data set, steps and rounds: `gradaudit claims`. With `noise_multiplier = 0` it only clips, and
    nothing is promised.

    Raises:
        BadInputError: a bound or noise that is no number above 0 (noise: at least 0), or the extra `dp` is missing.
    """

    name: ClassVar[str] = "dp-sgd"
    traits: ClassVar[frozenset[Trait]] = frozenset({"examples clipped"})
    clip: float = hyper(1.0, "bound C on the L2 norm of one example's gradient", source="partial gradients, section 6")
    noise_multiplier: float = hyper(
        1.0, "standard deviation of the noise on the sum over C", source="Abadi et al. 2016"
    )
    poisson: bool = hyper(
        True, "each example enters a local step by chance, as the accounting assumes; else shuffled minibatches"
    )

    def noise(self, before: float | None, tensors: int, steps: int) -> Noise:
        if not self.noise_multiplier:
            return Noise(without="gradients are clipped, and no noise is added to them")
        # no gain by sampling: which sentences are in the update is what is asked; one replaced moves a sum by 2 C
        return Noise(self.noise_multiplier, 2.0, "one example", steps)

    def deviation(self, sent: Tensor, examples: int | None) -> float | None:
        return self.noise_multiplier * self.clip / examples if self.noise_multiplier and examples else None

    def __post_init__(self) -> None:
        above_zero(self.name, "clip", self.clip)
        if not 0 <= self.noise_multiplier < math.inf:
            raise BadInputError(
                f"defense 'dp-sgd': noise_multiplier must be at least 0 and finite, got {self.noise_multiplier}"
            )

    @property
    def sampled(self) -> bool:
        return self.poisson

    def of_several(self, clients: int) -> DPSGD:
        # the clients' noises are independent: their sum has the root of their number
        return replace(self, noise_multiplier=self.noise_multiplier * math.sqrt(clients))

    def on_examples(
        self,
        chunks: Iterable[Mapping[str, Tensor]],
        parameters: Mapping[str, Tensor],
        expected: float,
        rng: torch.Generator,
    ) -> dict[str, Tensor]:
        # placeholders: the optimizer reads and writes gradients on them, and takes no step
        held: dict[str, Any] = {n: torch.nn.Parameter(torch.empty_like(p)) for n, p in parameters.items()}
        device = next(iter(held.values())).device
        optimizer = _optimizer()(
            torch.optim.SGD(held.values(), lr=1.0),
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.clip,
            expected_batch_size=expected,
            generator=rng if device.type == "cpu" else torch.Generator(device).manual_seed(draw_seed(rng)),
        )
        for p in held.values():
            p.summed_grad = torch.zeros_like(p)
        for chunk in chunks:
            for name, p in held.items():
                p.grad_sample = chunk[name]
            optimizer.clip_and_accumulate()
        for p in held.values():
            p.grad_sample = torch.empty((0, *p.shape), device=device)  # the optimizer counts passes by it
        optimizer.add_noise()
        optimizer.scale_grad()
        return {name: p.grad.detach() for name, p in held.items()}


def _optimizer() -> Any:
    try:
        from opacus.optimizers import DPOptimizer
    except ImportError:
        raise BadInputError("defense 'dp-sgd' needs Opacus: pip install 'gradaudit[dp]'") from None
    return DPOptimizer
