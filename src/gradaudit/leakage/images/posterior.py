"""From a reading to the likeliest images: what explains the update, not farther from the reading than readings are."""

from collections.abc import Callable

import torch
from torch import Tensor

from gradaudit.leakage.images.likelihood import ImageEvidence
from gradaudit.progress import track

_SLACK = 0.2, 0.01
"""Of the first step and of the last, falling in equal ratios: what cannot be violated is approached."""
_RATE = 0.01
"""Adam's, of pixels in 0 to 1; it falls to zero."""


def likeliest_images(
    evidence: ImageEvidence,
    reading: Tensor,
    label: int | None,
    classes: int,
    spread: Callable[[Tensor], Tensor],
    steps: int,
    what: str,
) -> Tensor:
    """Return the image [1, C, H, W] that is likeliest given an update and a reading of it.

    The reading's error has a law that was learned on public images; the update has one that the defenses make. Their
    product is climbed from the reading (maximum a posteriori). A label that is not known is the one that the reading
    explains the update best with.

    Args:
        evidence: minus the log likelihood of the update.
        reading: [1, C, H, W], where to start; not limited to 0 to 1.
        label: the image's; None where it is not known.
        classes: of the model.
        spread: minus the log density of what is to be added to a reading, [n] of [n, pixels].
        steps: of Adam.
        what: name for the progress bar.
    """
    start = reading.clamp(0, 1)
    if label is None:
        every = torch.arange(classes, device=reading.device)[:, None]
        with torch.no_grad():
            label = int(evidence(start.expand(classes, 1, *start.shape[1:]), every, _SLACK[0]).argmin())
    labels = torch.tensor([[label]], device=reading.device)
    images = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([images], lr=_RATE)
    first, last = _SLACK
    for step in track(range(steps), what):
        slack = first * (last / first) ** (step / max(1, steps - 1))
        with torch.enable_grad():
            loss = evidence(images[None], labels, slack) + spread((images - reading).flatten(1))
            (images.grad,) = torch.autograd.grad(loss.sum(), [images])
        for group in optimizer.param_groups:
            group["lr"] = _RATE * (1 - step / steps)
        optimizer.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return images.detach()
