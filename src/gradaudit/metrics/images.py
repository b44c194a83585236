"""Scores of recovered images against the originals, matched one to one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.errors import BadInputError
from gradaudit.metrics.align import assign
from gradaudit.metrics.perceptual import Perceptual

Scores = dict[str, float | None]

MOST_DB = 100.0
"""PSNR of an image without any error, in place of infinity, which JSON does not have."""
ALIKE_DB = 30.0
"""PSNR from which a guess counts as the original itself: an error of 8 gray levels of 256, hardly seen."""
SMALLEST = 6
"""Side from which images have an SSIM: its window of 11 pixels (Wang et al., 2004) sees their edges mirrored."""

IMAGE_METRICS: dict[str, str] = {
    "mse": "images: mean squared error of pixels in 0 to 1; lower means that more leaked",
    "psnr": "images: peak signal-to-noise ratio in dB, at most 100, mean over images",
    "ssim": "images: structural similarity, 1 for equal images, Gaussian window of 11 pixels, edges mirrored",
    "lpips": "images: perceptual distance, lower means that more leaked; null without its weights ([metrics] lpips)",
}


@dataclass(frozen=True)
class ImagePair:
    """An original with its guess (None: nothing was recovered for it), its place among the guesses, and scores."""

    original: Tensor
    guess: Tensor | None
    scores: Scores
    at: int | None = None


def align_images(originals: Tensor, guesses: Tensor | None, perceptual: Perceptual | None = None) -> list[ImagePair]:
    """Return one pair an original: one to one, Hungarian on MSE.

    Where nothing was recovered, scores are those of the picture farthest from the original, each pixel black or white:
    no answer scores worse, so that leaving images out never pays.

    Args:
        originals: [B, C, H, W] in 0 to 1.
        guesses: [n, C, H, W]; cut to 0 to 1; those with NaN are left out. None for nothing.
        perceptual: measures LPIPS; None for not at all.

    Raises:
        BadInputError: guesses of another shape, or the extra `vision` is missing.
    """
    if guesses is not None and guesses.shape[1:] != originals.shape[1:]:
        raise BadInputError(
            f"recovered images have the shape {tuple(guesses.shape[1:])}, the originals {tuple(originals.shape[1:])}"
        )
    found = originals[:0] if guesses is None else guesses.detach().to(originals).clamp(0, 1)
    valid = found.flatten(1).isfinite().all(1).nonzero().flatten().tolist() if len(found) else []
    found = found[valid]
    errors = (originals[:, None] - found[None]).square().flatten(2).mean(2)
    pairing = assign([[-float(e) for e in row] for row in errors]) if len(found) else [None] * len(originals)
    given = [None if at is None else found[at] for at in pairing]
    shown = torch.stack([farthest(o) if g is None else g for o, g in zip(originals, given, strict=True)])
    table = image_scores(originals, shown, perceptual)
    places = [None if at is None else valid[at] for at in pairing]
    return [ImagePair(*row) for row in zip(originals, given, table, places, strict=True)]


def farthest(original: Tensor) -> Tensor:
    """Return the picture of the largest MSE to an original: black where it is light, white where it is dark."""
    return (original < 0.5).to(original)


def image_scores(originals: Tensor, guesses: Tensor, perceptual: Perceptual | None = None) -> list[Scores]:
    """Return the scores of each guess beside its original, [B, C, H, W] both.

    SSIM and LPIPS are None where the images are too small for them, LPIPS also without its weights.

    Raises:
        BadInputError: the extra `vision` is missing.
    """
    errors = (originals - guesses).square().flatten(1).mean(1).tolist()
    similar = _ssim(originals, guesses)
    apart = [None] * len(originals) if perceptual is None else perceptual(originals, guesses)
    return [
        {"mse": mse, "psnr": min(MOST_DB, -10 * math.log10(max(mse, 1e-30))), "ssim": ssim, "lpips": lpips}
        for mse, ssim, lpips in zip(errors, similar, apart, strict=True)
    ]


def _ssim(originals: Tensor, guesses: Tensor) -> list[float | None]:
    if min(originals.shape[2:]) < SMALLEST:
        return [None] * len(originals)
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure
    except ImportError:
        raise BadInputError("scores of images need torchmetrics: pip install 'gradaudit[vision]'") from None
    found = structural_similarity_index_measure(guesses, originals, reduction="none", data_range=1.0)
    return [float(v) for v in found.reshape(-1)]  # type: ignore[union-attr]


def mean_scores(pairs: Sequence[ImagePair]) -> Scores:
    """Return a batch's scores, each the mean over its originals; None where one is undefined."""
    out: Scores = {}
    for name in pairs[0].scores:
        values = [p.scores[name] for p in pairs]
        known = [v for v in values if v is not None]
        out[name] = sum(known) / len(known) if len(known) == len(values) else None
    return out
