"""Gradient matching on images: how far the update of guessed images lies from the one that was seen.

Everything is batched over guesses: images are [N, B, C, H, W] and an objective returns [N], so that restarts are
evaluated together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradaudit.defense_traits import Trait, all_traits
from gradaudit.leakage.observed import as_gradient
from gradaudit.models.images import ImageModel
from gradaudit.progress import answering, track
from gradaudit.types import Observation, Reconstruction

IMAGE_COUNTERED: frozenset[Trait] = frozenset({"signs", "support"})
"""Traits that an adapted distance reckons with."""
_TINY = 1e-30


@dataclass(frozen=True)
class ImageMatch:
    """A distance between predicted and observed updates, over all tensors together.

    Args:
        how: "cosine", 1 - cos; "sign", a hinge on coordinates whose sign is not the one observed.
        support: compare only coordinates that were sent, not zero.
        power: of the hinge, 2 (squared) or 1 (plain).
        relative: divide the hinge by the predicted update's own size. Without it, as published, a gradient that
            vanishes has no wrong sign at all and fits any signs.
    """

    how: str = "cosine"
    support: bool = False
    power: int = 2
    relative: bool = True

    def __call__(self, predicted: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> Tensor:
        """Return the distances [N] of predicted updates, [N, ...] by name, to the observed one."""
        flat = torch.cat([predicted[name].flatten(1) for name in observed], 1)
        target = torch.cat([value.flatten() for value in observed.values()])
        if self.support or self.how == "sign":
            sent = (target != 0).to(flat)
            flat, target = flat * sent, target * sent
        if self.how == "sign":
            wrong = torch.relu(-flat * target.sign()).pow(self.power).sum(1)
            if not self.relative:
                return wrong
            return wrong / flat.abs().pow(self.power).sum(1).clamp_min(_TINY)
        norms = flat.square().sum(1).clamp_min(_TINY).sqrt() * target.square().sum().clamp_min(_TINY).sqrt()
        return 1 - flat @ target / norms


def match_for(seen: Observation[ImageModel], power: int, relative: bool) -> ImageMatch:
    """Return the distance that reckons with the defenses the attacker was told of.

    Source: LTI (Wu et al., 2022), baselines under defenses: hinge for signs, nonzero coordinates for pruning.

    Args:
        seen: the observation.
        power, relative: of the hinge.
    """
    told = all_traits(seen.knowledge.defenses)
    return ImageMatch("sign" if "signs" in told else "cosine", "support" in told, power, relative)


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute slope, down plus across, [N] of [N, B, C, H, W].

    In units of the picture's side over 32, so that a picture counts much the same in any resolution, and on CIFAR-10 it
    is the mean difference of neighboring pixels that papers take.
    """
    height, width = images.shape[-2:]
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().flatten(1).mean(1)
    across = (images[..., :, 1:] - images[..., :, :-1]).abs().flatten(1).mean(1)
    return (down * height + across * width) / 32


def first_labels(known: Tensor | None, shape: tuple[int, int], classes: int, rng: torch.Generator) -> Tensor:
    """Return the labels of guesses [N, B], or where they are not known logits [N, B, classes] to learn them from.

    Args:
        known: [B] labels.
        shape: N and B.
        classes: of the model.
        rng: draws the logits.
    """
    return 0.1 * torch.randn((*shape, classes), generator=rng) if known is None else known.expand(shape)


class ImageObjective:
    """How far the update of guessed images lies from the observed one.

    `passes` says how many gradients a guess costs.

    Args:
        seen: the observation.
        match: the distance.

    Raises:
        NotSupportedError: a weight change that cannot be read as a gradient.
    """

    def __init__(self, seen: Observation[ImageModel], match: ImageMatch) -> None:
        self._model, self._match = seen.model, match
        self._observed = as_gradient(seen)
        self._size, how = seen.knowledge.batch_size, seen.knowledge.training
        self._steps = 1 if how is None or self._size is None or seen.kind == "gradient" else how.steps(self._size)
        self.passes = 1

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the distances [N]; differentiable by images and labels.

        Args:
            images: [N, B, C, H, W].
            labels: [N, B] classes or [N, B, classes] distributions.
        """
        return self._match(self._model.gradients(images, labels), self._observed)

    def details(self) -> dict[str, Any]:
        """Return plain numbers on what was evaluated, for the record."""
        return {}

    def notes(self) -> tuple[str, ...]:
        """Return remarks for the report."""
        if self._steps > 1:
            return (f"a weight change of {self._steps} local steps was read as one gradient",)
        return ()


def reconstructed(
    objective: ImageObjective, images: Tensor, labels: Tensor, how: str, distances: dict[str, float], guesses: int
) -> Reconstruction:
    """Return what was found, for the record.

    Args:
        objective: what was minimized.
        images: [B, C, H, W].
        labels: [B] classes, or [B, classes] shares.
        how: where labels are from.
        distances: at the end, by name.
        guesses: that were evaluated.
    """
    classes = labels.argmax(-1) if labels.dim() > 1 else labels
    counted = {"labels": how, "gradient_evaluations": guesses * objective.passes}
    return Reconstruction(
        images=images.cpu(),
        labels=tuple(classes.tolist()),
        notes=objective.notes(),
        details=distances | counted | objective.details(),
    )


def minimize_images(
    start: Tensor,
    labels: Tensor,
    learn: bool,
    loss: Callable[[Tensor, Tensor], Tensor],
    steps: int,
    learning_rate: float,
    what: str,
) -> tuple[Tensor, Tensor]:
    """Return where signed Adam ends from each start, images [N, B, C, H, W] and labels, kept in the box of 0 to 1.

    Adam on the sign of the slope, its rate divided by 10 after 3/8, 5/8 and 7/8 of the steps (Geiping et al., 2020).

    Args:
        start: [N, B, C, H, W].
        labels: [N, B] labels in force, or logits [N, B, classes] to learn distributions from.
        learn: whether they are learned.
        loss: of images and labels, [N].
        steps: how many.
        learning_rate: of the first steps.
        what: name for the progress bar.

    Raises:
        StoppedError: Ctrl-C, with where it was.
    """
    images = start.detach().clone().requires_grad_()
    logits = labels.detach().clone().requires_grad_(learn)
    wanted = [images, logits] if learn else [images]
    optimizer = torch.optim.Adam(wanted, lr=learning_rate)

    def end() -> tuple[Tensor, Tensor]:
        return images.detach(), (logits.softmax(-1) if learn else logits).detach()

    with answering(lambda _: end()):
        for step in track(range(steps), what):
            value = loss(images, logits.softmax(-1) if learn else logits)
            slopes = torch.autograd.grad(value.sum(), wanted)
            images.grad = slopes[0].sign()
            if learn:
                logits.grad = slopes[1]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * 0.1 ** sum(step >= steps * part / 8 for part in (3, 5, 7))
            optimizer.step()
            with torch.no_grad():
                images.clamp_(0, 1)
    return end()
