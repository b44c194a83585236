"""The gradients of many batches in one pass: each is made from its factors, parameter by parameter."""

from collections.abc import Collection, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradaudit.models.taps import Tap
from gradaudit.models.transformers import TransformersModel

_tapped: WeakKeyDictionary[TransformersModel, frozenset[str]] = WeakKeyDictionary()


def tapped_parameters(model: TransformersModel) -> frozenset[str]:
    """Return the names of the parameters whose gradients factors make; others need a pass a batch (MPNet's bias)."""
    if model in _tapped:
        return _tapped[model]
    words = model.word_vectors()[:3]
    ids = torch.arange(3, device=words.device).expand(2, 3)
    labels = ids if model.spec.task == "causal-lm" else torch.zeros(2, dtype=torch.long, device=words.device)
    with torch.enable_grad():
        traced = model.traced(
            embeddings=words.expand(2, 3, -1), mask=ids >= 0, labels=labels, watch=list(model.parameters())
        )
    _tapped[model] = frozenset(traced.taps) | frozenset(model.group("word"))
    return _tapped[model]


def gradients_of_batches(
    model: TransformersModel,
    ids: Tensor,
    mask: Tensor,
    labels: Tensor | None,
    wanted: Collection[str],
    every_row: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each wanted parameter's gradients [n, ...] of n batches, as `Client` computes them one by one.

    The model is left in the mode that it is in: in training mode dropout draws from torch's global stream.

    Args:
        model: the model; it is left as it is.
        ids: [n, B, T] token ids.
        mask: [n, B, T] bool.
        labels: [n, B] classes, or [n, B, C] distributions; None for causal language modeling.
        wanted: parameter names, out of `tapped_parameters`.
        every_row: compute rows that a classifier does not read too, so that dropout draws as in the client's pass.
    """
    count, size = ids.shape[:2]
    flat, real = ids.flatten(0, 1), mask.flatten(0, 1)
    words = set(model.group("word"))
    watch = [name for name in model.parameters() if name in wanted]
    targets = flat if labels is None else labels.flatten(0, 1)
    with torch.enable_grad():
        vectors = model.word_vectors()[flat].requires_grad_(True)
        traced = model.traced(embeddings=vectors, mask=real, labels=targets, watch=watch, every_row=every_row)
        sums = traced.losses.view(count, size).sum(1)
        # text predicts each real token behind another: as many shares as the batch has of them
        shares = (mask[..., 1:] & mask[..., :-1]).sum((1, 2)).clamp_min(1)  # a lone token has none, and a loss of 0
        weight = shares if labels is None else torch.full_like(sums, size)
        total = (sums / weight).sum()
        uses = [(name, tap) for name, taps in traced.taps.items() for tap in taps]
        written = [tap.written for _, tap in uses]
        slopes = torch.autograd.grad(total, [vectors, *written], allow_unused=True)
    first, found = slopes[0], slopes[1:]
    shapes = {name: p.shape for name, p in model.parameters().items()}
    for name in watch:
        made = [
            _gradient(tap, slope, count, shapes[name])
            for (other, tap), slope in zip(uses, found, strict=True)
            if other == name and slope is not None
        ]
        if name in words and first is not None:
            looked_up = Tap("lookup", flat, vectors)
            made.append(_gradient(looked_up, first, count, shapes[name]))
        total_of = made[0] if made else vectors.new_zeros(count, *shapes[name])
        for more in made[1:]:
            total_of = total_of + more
        yield name, total_of.detach()


def _gradient(tap: Tap, slope: Tensor, count: int, shape: torch.Size) -> Tensor:
    """Return [count, *shape] from a tap of count * B sentences, in the orientation of the parameter."""
    written = slope.reshape(count, -1, slope.shape[-1])
    if tap.how == "shift":
        return written.sum(1).view(count, *shape)
    read = tap.read.detach().reshape(count, -1, *tap.read.shape[2:])
    if tap.how == "scale":
        return (written * read).sum(1).view(count, *shape)
    if tap.how == "lookup":
        out = written.new_zeros(count, *shape)
        at = read[..., None].expand_as(written)
        return out.scatter_add_(1, at.clamp_min(0), torch.where(at < 0, 0.0, written))
    return read.mT @ written if tap.how == "transposed" else written.mT @ read
