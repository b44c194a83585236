"""GI-GIP: inverting gradients with a generator as prior."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import Trait
from gradaudit.leakage import options
from gradaudit.leakage.images.generator import GeneratorSpec, generator_of
from gradaudit.leakage.images.matching import IMAGE_COUNTERED, first_labels, match_for, reconstructed, total_variation
from gradaudit.leakage.images.replay import image_objective
from gradaudit.leakage.labels import known_labels
from gradaudit.leakage.matching.descent import pull
from gradaudit.models.images import ImageModel
from gradaudit.progress import answering, track
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction


@register
@dataclass(frozen=True)
class GenerativePrior(Attack[ImageModel]):
    """Match the update with images of a generator: first by its latents, then by the generator's own weights.

    The generator is learned from public images alone, once a run. Told of signs it counts wrong signs (plain hinge),
    told of pruning it compares what was sent alone.
    """

    name: ClassVar[str] = "gigip"
    source: ClassVar[str] = (
        "GI-GIP (Jeon et al., NeurIPS 2021), section 3; the generator is a variational autoencoder's decoder, theirs a "
        "GAN's; all images of a batch share its searched weights"
    )
    needs: ClassVar[tuple[str, ...]] = ("batch_size", "public")
    tasks: ClassVar[tuple[str, ...]] = ("image-classification",)
    handles: ClassVar[frozenset[Trait]] = IMAGE_COUNTERED | {"zero mean"}
    models_dropout: ClassVar[bool] = True  # these models have none
    latent_steps: int = hyper(500, "Adam steps over latents", source="ours")
    latent_rate: float = hyper(0.05, "learning rate of latents", source="ours")
    weight_steps: int = hyper(1000, "Adam steps over the generator's weights, from the best latents", source="ours")
    weight_rate: float = hyper(1e-3, "learning rate of weights", source="ours")
    restarts: int = hyper(4, "independent latents, minimized together; the best fit goes on", source="ours")
    relative: bool = options.relative()
    total_variation: float = hyper(1e-4, "weight of the total variation", source="ours")
    latent_norm: float = hyper(1e-4, "weight of the mean squared latent", source="ours, after Jeon et al.")
    training_steps: int = hyper(2000, "steps the generator is trained for", source="ours")
    latent: int = hyper(64, "numbers an image is made from", source="ours")
    replayed_steps: int = options.replayed_steps()

    def __post_init__(self) -> None:
        self._at_least(0, "latent_steps", "weight_steps", "training_steps", "latent_rate", "weight_rate")
        self._at_least(0, "total_variation", "latent_norm", "replayed_steps")
        self._at_least(1, "restarts", "latent")

    def run(self, seen: Observation[ImageModel], rng: torch.Generator) -> Reconstruction:
        model, size, public = seen.model, seen.knowledge.batch_size or 1, seen.public
        assert public is not None  # `needs`
        generator = generator_of(public, GeneratorSpec(self.latent, steps=self.training_steps), model.device)
        objective = image_objective(seen, match_for(seen, 1, self.relative), self.replayed_steps)
        known, how = known_labels(seen)
        learn, shape = known is None, (self.restarts, size)
        latents = torch.randn((*shape, self.latent), generator=rng).to(model.device).requires_grad_()
        labels = first_labels(known, shape, model.spec.labels, rng).to(model.device)
        labels = labels.clone().requires_grad_(learn)

        def loss(images: Tensor, classes: Tensor) -> Tensor:
            return objective(images, classes) + self.total_variation * total_variation(images)

        def classes(labels: Tensor) -> Tensor:
            return labels.softmax(-1) if learn else labels

        wanted = [latents, labels] if learn else [latents]
        optimizer = torch.optim.Adam(wanted, lr=self.latent_rate)
        for _ in track(range(self.latent_steps), f"{self.name}: latents"):
            value = loss(generator(latents), classes(labels))
            value = value + self.latent_norm * latents.square().flatten(1).mean(1)
            pull(value, wanted)
            optimizer.step()
        with torch.no_grad():
            first = objective(generator(latents), classes(labels))
        best = int(first.nan_to_num(nan=torch.inf).argmin())
        chosen, own = latents[best : best + 1].detach(), labels[best : best + 1].detach().requires_grad_(learn)
        weights = {n: w.clone().requires_grad_() for n, w in generator.weights.items()}
        wanted = [*weights.values(), own] if learn else list(weights.values())
        optimizer = torch.optim.Adam(wanted, lr=self.weight_rate)

        @torch.no_grad()
        def told() -> Reconstruction:
            images = generator(chosen, weights)
            value = objective(images, classes(own))
            guesses = (self.latent_steps + 1) * self.restarts + self.weight_steps + 1
            distances = {"distance": float(value[0]), "distance_of_latents": float(first[best])}
            return reconstructed(objective, images[0], classes(own)[0], how, distances, guesses)

        with answering(lambda _: told()):
            for _ in track(range(self.weight_steps), f"{self.name}: weights"):
                pull(loss(generator(chosen, weights), classes(own)), wanted)
                optimizer.step()
        return told()

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return 2 * (self.latent_steps * self.restarts + self.weight_steps)
