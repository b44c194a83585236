"""Taking a recovered sentence out of a gradient: the ranks fall by its length, and that proves that it was in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.subspace import Span, gap_rank
from gradaudit.models.base import TextModel
from gradaudit.models.many_gradients import gradients_of_batches
from gradaudit.types import Observation

Matrices = Mapping[tuple[int, str], Tensor]
"""Gradients by (block, role), [out, d] float64."""


def matrices(seen: Observation, layers: int) -> dict[tuple[int, str], Tensor]:
    """Return the seen q, k and v gradients of the first blocks; those not shared or all zero are left out."""
    return matrices_of(seen, [(layer, role) for layer in range(min(layers, seen.model.depth)) for role in "qkv"])


def matrices_of(seen: Observation, keys: Iterable[tuple[int, str]]) -> dict[tuple[int, str], Tensor]:
    """Return the seen gradients by (block, role); those not shared, or in part, or all zero are left out.

    A feed-forward with a gate has two matrices that read the same: one above the other, [2 out, in].
    """
    found = {}
    for key in keys:
        sent = seen.role(*key)
        if len(sent) == len(seen.model.views(*key)) and any(bool(tensor.any()) for tensor in sent):
            found[key] = torch.cat([tensor.detach().double() for tensor in sent])
    return found


def sentence_gradient(model: TextModel, sentence: tuple[int, ...], label: int | None, like: Matrices) -> Matrices:
    """Return one sentence's own gradient (batch of one), for the same matrices; see `sentence_gradients`."""
    found = sentence_gradients(model, [sentence], label, like)
    return {key: gradient[0].double() for key, gradient in found.items()}


def sentence_gradients(
    model: TextModel, sentences: Sequence[Sequence[int]], label: int | Tensor | None, like: Matrices
) -> Matrices:
    """Return each sentence's own gradient (batch of one), for the same matrices, each [n, out, d], from one pass.

    Args:
        model: the model, in evaluation mode.
        sentences: token ids.
        label: their class, or [C] by what each class's log-probability is weighed; None where next words are predicted.
        like: the matrices wanted.
    """
    device = next(iter(like.values())).device
    longest = max(map(len, sentences))
    ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sentences], device=device)
    mask = torch.arange(longest, device=device) < torch.tensor([[len(s)] for s in sentences], device=device)
    labels = (
        None
        if label is None
        else torch.as_tensor(label, device=device).expand(len(ids), 1, *torch.as_tensor(label).shape)
    )
    views = {key: model.views(*key) for key in like}
    wanted = {view.parameter for some in views.values() for view in some}
    found = dict(gradients_of_batches(model, ids[:, None], mask[:, None], labels, wanted))
    return {
        key: torch.cat([torch.vmap(view)(found[view.parameter]) for view in some], 1) for key, some in views.items()
    }


@dataclass(frozen=True)
class Remainder:
    """What is left of a gradient after some sentences were taken out.

    Args:
        left: the matrices now.
        whole: norms of the matrices as they were sent: rounding is relative to these.
        eps: rounding of the gradient's type.
    """

    left: Matrices
    whole: Mapping[tuple[int, str], float]
    eps: float

    def without(self, gradient: Matrices, share: float) -> Remainder:
        """Return what is left after `share` of a sentence's gradient is subtracted."""
        return Remainder({k: g - share * gradient[k] for k, g in self.left.items()}, self.whole, self.eps)

    def stacked(self, layer: int) -> Tensor:
        """Return a block's q, k and v, each scaled by what it was when sent, [out, d]."""
        return torch.cat([g / self.whole[key] for key, g in self.left.items() if key[0] == layer and key[1] in "qkv"])

    def span(self, layer: int) -> Span:
        """Return a block's row space; its rank is cut at the rounding of the whole gradient, not of the rest."""
        _, values, vh = torch.linalg.svd(self.stacked(layer), full_matrices=False)
        level = max(float(values[0]), 1e-300)
        rank, confidence = (0, 1.0) if level < 64 * self.eps else gap_rank(values, min(self.eps / level, 1e-3))
        roles = tuple(role for at, role in self.left if at == layer and role in "qkv")
        return Span(vh[:rank].T.contiguous(), values, rank, confidence, layer, roles)


def remainder(left: Matrices, eps: float) -> Remainder:
    """Return the remainder from which nothing was taken yet."""
    return Remainder(left, {key: float(g.norm()) for key, g in left.items()}, eps)
