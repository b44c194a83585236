"""IG: inverting gradients of images by cosine, total variation and signed Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import Trait
from gradaudit.leakage.images.matching import (
    COUNTERED,
    Signed,
    image_labels,
    match_for,
    minimize_images,
    total_variation,
)
from gradaudit.leakage.images.replay import image_objective
from gradaudit.models.images import ImageModel
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction


@register
@dataclass(frozen=True)
class InvertingGradients(Attack[ImageModel]):
    """Match the direction of the update with smooth images: 1 - cosine + total variation, by signed Adam in a box.

    All restarts are minimized together. Told of signs it counts wrong signs (squared hinge), told of pruning it
    compares what was sent alone.
    """

    name: ClassVar[str] = "ig"
    source: ClassVar[str] = (
        "Inverting Gradients (Geiping et al., NeurIPS 2020), algorithm 1; under defenses as LTI (Wu et al., 2022) runs "
        "it, but the hinge is divided by the update's size"
    )
    needs: ClassVar[tuple[str, ...]] = ("batch_size",)
    tasks: ClassVar[tuple[str, ...]] = ("image-classification",)
    handles: ClassVar[frozenset[Trait]] = COUNTERED | {"zero mean"}
    models_dropout: ClassVar[bool] = True  # these models have none
    steps: int = hyper(2000, "steps of signed Adam", source="ours: the paper takes 4,800 on CIFAR-10")
    learning_rate: float = hyper(0.1, "at first; a tenth after 3/8, 5/8 and 7/8 of the steps", source="Geiping et al.")
    restarts: int = hyper(4, "independent starts, minimized together; the best fit wins", source="ours, the paper: 1")
    relative: bool = hyper(
        True, "divide the hinge on wrong signs by the update's size", source="ours, the paper: no", later=True
    )
    total_variation: float = hyper(5e-3, "weight of the total variation", source="ours: tried on digits and CIFAR-10")
    replayed_steps: int = hyper(
        8,
        "local steps of a weight change replayed at most; of more it is read as one gradient, 0 always",
        source="ours",
        deltas=True,
    )

    def __post_init__(self) -> None:
        self._at_least(0, "steps", "learning_rate", "total_variation", "replayed_steps")
        self._at_least(1, "restarts")

    def run(self, seen: Observation[ImageModel], rng: torch.Generator) -> Reconstruction:
        model, size = seen.model, seen.knowledge.batch_size or 1
        objective = image_objective(seen, match_for(seen, 2, self.relative), self.replayed_steps)
        known = image_labels(seen)
        shape = (self.restarts, size, *model.shape)
        start = (0.5 + 0.25 * torch.randn(shape, generator=rng)).clamp(0, 1).to(model.device)
        if known.values is not None:
            labels = known.values.expand(self.restarts, size)
        else:
            labels = 0.1 * torch.randn((self.restarts, size, model.spec.labels), generator=rng).to(model.device)

        def loss(images: Tensor, classes: Tensor) -> Tensor:
            return objective(images, classes) + self.total_variation * total_variation(images)

        how = Signed(self.steps, self.learning_rate)
        images, final = minimize_images(start, labels, known.values is None, loss, how, self.name)
        with torch.no_grad():
            value = objective(images, final)
        best = int(value.nan_to_num(nan=torch.inf).argmin())
        classes = final[best].argmax(-1) if known.values is None else final[best]
        return Reconstruction(
            images=images[best].cpu(),
            labels=tuple(int(y) for y in classes),
            notes=objective.notes(),
            details={
                "distance": float(value[best]),
                "labels": known.how,
                "gradient_evaluations": (self.steps + 1) * self.restarts * objective.passes,
            }
            | objective.details(),
        )

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return 2 * self.steps * self.restarts
