"""IG: inverting gradients of images by cosine, total variation and signed Adam."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import Trait
from gradaudit.leakage import options
from gradaudit.leakage.images.matching import (
    IMAGE_COUNTERED,
    first_labels,
    match_for,
    minimize_images,
    reconstructed,
    total_variation,
)
from gradaudit.leakage.images.replay import image_objective
from gradaudit.leakage.labels import known_labels
from gradaudit.models.images import ImageModel
from gradaudit.progress import answering
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
    handles: ClassVar[frozenset[Trait]] = IMAGE_COUNTERED | {"zero mean"}
    models_dropout: ClassVar[bool] = True  # these models have none
    steps: int = hyper(2000, "steps of signed Adam", source="ours: the paper takes 4,800 on CIFAR-10")
    learning_rate: float = hyper(0.1, "at first; a tenth after 3/8, 5/8 and 7/8 of the steps", source="Geiping et al.")
    restarts: int = hyper(4, "independent starts, minimized together; the best fit wins", source="ours, the paper: 1")
    relative: bool = options.relative()
    total_variation: float = hyper(5e-3, "weight of the total variation", source="ours: tried on digits and CIFAR-10")
    replayed_steps: int = options.replayed_steps()

    def __post_init__(self) -> None:
        self._at_least(0, "steps", "learning_rate", "total_variation", "replayed_steps")
        self._at_least(1, "restarts")

    def run(self, seen: Observation[ImageModel], rng: torch.Generator) -> Reconstruction:
        model, size = seen.model, seen.knowledge.batch_size or 1
        objective = image_objective(seen, match_for(seen, 2, self.relative), self.replayed_steps)
        known, how = known_labels(seen)
        shape = (self.restarts, size)
        start = (0.5 + 0.25 * torch.randn((*shape, *model.shape), generator=rng)).clamp(0, 1).to(model.device)
        labels = first_labels(known, shape, model.spec.labels, rng).to(model.device)

        def loss(images: Tensor, classes: Tensor) -> Tensor:
            return objective(images, classes) + self.total_variation * total_variation(images)

        steps, rate = self.steps, self.learning_rate

        def told(images: Tensor, final: Tensor) -> Reconstruction:
            with torch.no_grad():
                value = objective(images, final)
            best = int(value.nan_to_num(nan=torch.inf).argmin())
            guesses = (self.steps + 1) * self.restarts
            return reconstructed(objective, images[best], final[best], how, {"distance": float(value[best])}, guesses)

        with answering(lambda had: had and told(*had)):
            return told(*minimize_images(start, labels, known is None, loss, steps, rate, self.name))

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return 2 * self.steps * self.restarts
