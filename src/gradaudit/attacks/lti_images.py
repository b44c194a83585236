"""LTI for images: a network that learned, on public images, to read defended updates."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import ANYTHING, Trait
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.leakage.images.likelihood import LAWS, ImageEvidence, has_law
from gradaudit.leakage.images.posterior import likeliest_images
from gradaudit.leakage.labels import known_labels
from gradaudit.learned.images.fit import ImagePlan, ReplaysImages, fit_image_inverter
from gradaudit.learned.images.inverter import ImageInverter, load_image_inverter, save_image_inverter
from gradaudit.learned.manifest import Target
from gradaudit.models.images import ImageModel
from gradaudit.registry import register
from gradaudit.types import Observation, PublicImages, Reconstruction


@register
@dataclass(frozen=True)
class LtiImages(ImagePlan, Attack[ImageModel]):
    """Read the images of an update by a network that was trained on simulated updates of public images.

    As `lti` does for text: the attacker computes the updates that the client would send of public images, defenses
    included, and learns the way back to the pixels by squared error; the update under attack then costs one pass. With
    `refine` it goes on to the likeliest image given that reading and the update.

    Raises:
        BadInputError: a setting that makes no sense.
    """

    name: ClassVar[str] = "lti-images"
    source: ClassVar[str] = (
        "Learning to Invert (Wu et al., arXiv 2210.10880), sections 3 and 4.2. Ours: numbers are scaled one by one by "
        "the public simulations (the paper feeds them as they are), the rate falls by a cosine (its falls once), the "
        "network begins with the mean image, every second pass sees images mirrored, images come in any order; the "
        "kernel and refine"
    )
    tasks: ClassVar[tuple[str, ...]] = ("image-classification",)
    handles: ClassVar[frozenset[Trait]] = ANYTHING - {"remembers"}
    takes_any: ClassVar[bool] = True
    models_dropout: ClassVar[bool] = True
    exact_on_deltas: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.learner not in ("network", "kernel"):
            raise BadInputError(f"attack 'lti-images': learner must be 'network' or 'kernel', got '{self.learner}'")
        self._at_least(1, "width", "hidden", "epochs", "batch")
        self._at_least(0, "patience", "refine")
        if self.refine and self.learner != "kernel":
            raise BadInputError(
                "attack 'lti-images': refine needs to know how far off readings are, which learner = \"kernel\" tells"
            )
        if not self.learning_rate > 0 or not 0 < self.validation < 1:
            raise BadInputError(
                "attack 'lti-images': learning_rate must be above 0, validation must lie between 0 and 1"
            )

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return 2 * self.refine

    @property
    def unfitted(self) -> bool:
        return not self.inverter

    def simulated_updates(self, public: int) -> int:
        return public * (1 + self.mirrored)

    def fit(
        self,
        simulate: ReplaysImages,
        public: PublicImages,
        target: Target,
        model: ImageModel,
        folder: Path,
        rng: torch.Generator,
    ) -> Attack[ImageModel]:
        if self.learner == "kernel" and target.batch_size > 1:
            raise NotSupportedError(
                "attack 'lti-images': a kernel reads one image an update; set learner = \"network\""
            )
        found = fit_image_inverter(simulate, public, target, model, self, folder, rng)
        return self.fitted_in(save_image_inverter(folder, found))

    def fitted_in(self, folder: Path) -> Attack[ImageModel]:
        return replace(self, inverter=str(folder))

    def run(self, seen: Observation[ImageModel], rng: torch.Generator) -> Reconstruction:
        if not self.inverter:
            raise NotSupportedError(
                "attack 'lti-images' has no inverter: give [public] images to 'gradaudit run' or 'gradaudit fit', or "
                'name one with inverter = "DIR"'
            )
        inverter = load_image_inverter(Path(self.inverter))
        about = inverter.manifest
        if self.refine:
            images, notes = self._refined(seen, inverter)
        else:
            images, notes = inverter.images(seen).clamp(0, 1), ()
        note = f"learned from {about.images} public images ({about.public}); MSE {about.mse:.4f} on held-out ones"
        return Reconstruction(
            images=images,
            notes=(note, *notes),
            details={"public_images": about.images, "validation": about.mse, "training_steps": about.steps},
        )

    def _refined(self, seen: Observation[ImageModel], inverter: ImageInverter) -> tuple[Tensor, tuple[str, ...]]:
        """Return the likeliest image given the reading and the update, and a note."""
        reading, spread = inverter.images(seen), inverter.spread
        if spread is None:
            raise NotSupportedError("attack 'lti-images': this inverter was saved without its spread; fit it again")
        if not has_law(seen):
            return reading.clamp(0, 1), (f"not refined: images have no likelihood here but {LAWS}",)
        labels, _ = known_labels(seen)
        known = None if labels is None else int(labels[0])
        law, classes = spread.to(reading.device), seen.model.spec.labels
        found = likeliest_images(ImageEvidence(seen), reading, known, classes, law, self.refine, self.name)
        return found, ("refined: the likeliest image given the reading and the update",)
