"""The judge of images: sees the private batch and the reconstruction together, as `judge` does for text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gradaudit.client import Client
from gradaudit.judge import modeled, read_as_gradient, update_distance
from gradaudit.metrics.images import ALIKE_DB, Scores, align_images, mean_scores
from gradaudit.metrics.perceptual import Perceptual
from gradaudit.models.images import ImageModel
from gradaudit.png import png
from gradaudit.record import Diagnosis, ImageMarks
from gradaudit.types import ImageBatch, Observation, Reconstruction


@dataclass(frozen=True)
class ImageJudgment:
    """Recovered images against the truth.

    Args:
        scores: means over the batch.
        images: scores of each original, in the batch's order.
        originals, recovered: base64 PNG of each; None where nothing was recovered.
        alike: every image was recovered so well that it hardly differs (PSNR).
    """

    scores: Scores
    images: tuple[ImageMarks, ...]
    originals: tuple[str, ...]
    recovered: tuple[str | None, ...]
    alike: bool


def judge_images(batch: ImageBatch, found: Reconstruction, perceptual: Perceptual | None = None) -> ImageJudgment:
    """Compare a reconstruction with the batch: aligned once, one to one; see `align_images` for what is missing.

    Args:
        batch: the truth.
        found: what the attack returned; an empty one scores as a failure.
        perceptual: measures LPIPS; None for not at all.
    """
    originals = batch.images.cpu()
    pairs = align_images(originals, None if found.images is None else found.images.cpu(), perceptual)
    marks = tuple(ImageMarks.model_validate({"found": p.guess is not None} | p.scores) for p in pairs)
    return ImageJudgment(
        scores=mean_scores(pairs),
        images=marks,
        originals=tuple(png(p.original) for p in pairs),
        recovered=tuple(None if p.guess is None else png(p.guess) for p in pairs),
        alike=all(m.found and (m.psnr or 0.0) >= ALIKE_DB for m in marks),
    )


def diagnose_images(
    model: ImageModel, batch: ImageBatch, seen: Observation[ImageModel], found: Reconstruction, alike: bool
) -> Diagnosis:
    """Compare the update of the truth and of the guess with the observed one; see `judge.diagnose`.

    Args:
        model: the model.
        batch: the truth.
        seen: what the attack saw.
        found: what it returned.
        alike: every image was recovered.
    """
    client = Client(model)
    truth = update_distance(client, batch, seen)
    nothing = Diagnosis(truth=truth, guess=None, verdict="no guess")
    if found.images is None or len(found.images) == 0:
        return nothing
    images, known = found.images.cpu(), found.labels if found.labels is not None else tuple(batch.labels.tolist())
    places = list(range(len(images)))
    if len(images) > len(batch):  # as in the scores, those that were held against an original
        places = sorted(p.at for p in align_images(batch.images.cpu(), images) if p.at is not None)
    if not places:
        return nothing
    labels = torch.tensor([known[at % len(known)] for at in places])
    guess = update_distance(client, ImageBatch(images[places], labels), seen)
    verdict: Literal["solved", "optimizer failed", "objective failed"]
    verdict = "solved" if alike else "optimizer failed" if truth < guess else "objective failed"
    return Diagnosis(truth=truth, guess=guess, verdict=verdict)


def image_flags(
    *,
    model: ImageModel,
    seen: Observation[ImageModel],
    made: Mapping[str, Any],
    attack: Any,
    surplus: bool,
    scores: Scores,
    baseline: Scores,
    diagnosis: Diagnosis | None,
) -> tuple[str, ...]:
    """Return the names of all flags that hold for one batch of images (see `gradaudit.flags`).

    Args:
        made: how the update was made ("defenses", local "steps", "clients"), and whether the attack "replayed" it.
        attack: the attack that was run.
        surplus: it returned more images than the batch has.
    """
    raised = {
        "random-weights": model.spec.random_weights,
        "surplus-guesses": surplus,
        "defense-not-modeled": not all(
            modeled(attack, str(d["name"]), seen, made["clients"]) for d in made["defenses"]
        ),
        "delta-as-gradient": read_as_gradient(attack, seen, made),
        "optimizer-failed": diagnosis is not None and diagnosis.verdict == "optimizer failed",
        "objective-failed": diagnosis is not None and diagnosis.verdict == "objective failed",
        "blind-not-beaten": attack.name != "blind" and (scores["mse"] or 0.0) >= (baseline["mse"] or 0.0),
    }
    return tuple(sorted(name for name, holds in raised.items() if holds))
