"""Recovered images against the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gradaudit.data.png import png
from gradaudit.judge.judgment import Judge, Judgment
from gradaudit.metrics.images import ALIKE_DB, Scores, align_images, mean_scores
from gradaudit.metrics.perceptual import Perceptual
from gradaudit.record import ImageMarks, Pictures
from gradaudit.types import ImageBatch, Reconstruction


@dataclass(frozen=True)
class ImageJudgment(Judgment):
    """Recovered images against the truth.

    Args:
        scores: means over the batch.
        images: scores of each original, in the batch's order.
        originals, recovered: base64 PNG of each; None where nothing was recovered.
        solved: every image was recovered so well that it hardly differs (PSNR).
    """

    scores: Scores
    images: tuple[ImageMarks, ...]
    originals: tuple[str, ...]
    recovered: tuple[str | None, ...]
    solved: bool

    def of_record(self, baseline: ImageJudgment) -> dict[str, Any]:
        return {"images": self.images, "images_baseline": baseline.images}


@dataclass(frozen=True)
class ImageJudge(Judge[ImageBatch]):
    """Compares images.

    Args:
        perceptual: measures LPIPS; None for not at all.
    """

    private: ClassVar[type[Pictures]] = Pictures
    file: ClassVar[str] = "images.jsonl"
    perceptual: Perceptual | None = None

    def judge(self, batch: ImageBatch, found: Reconstruction) -> ImageJudgment:
        originals = batch.images.cpu()
        pairs = align_images(originals, None if found.images is None else found.images.cpu(), self.perceptual)
        marks = tuple(ImageMarks.model_validate({"found": p.guess is not None} | p.scores) for p in pairs)
        return ImageJudgment(
            scores=mean_scores(pairs),
            images=marks,
            originals=tuple(png(p.original) for p in pairs),
            recovered=tuple(None if p.guess is None else png(p.guess) for p in pairs),
            solved=all(m.found and (m.psnr or 0.0) >= ALIKE_DB for m in marks),
        )

    def guessed(self, batch: ImageBatch, found: Reconstruction) -> ImageBatch | None:
        if found.images is None or len(found.images) == 0:
            return None
        # the truth's labels stand in the batch's order, what was found in any
        pairs = align_images(batch.images.cpu(), found.images.cpu())
        own = {p.at: int(label) for p, label in zip(pairs, batch.labels, strict=True) if p.at is not None}
        places = sorted(own)
        labels = torch.tensor([own[at] if found.labels is None else found.labels[at] for at in places])
        return ImageBatch(found.images.cpu()[places], labels) if places else None
