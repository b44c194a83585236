"""How well a sentence's own attention explains what came back to its words, whatever came back to the attention.

Block 0's attention takes the sentence's queries, keys and values, and its derivative brings a signal O at what it mixed
back to all three: linear in O, one unknown [n, d] for three known [n, d]. The right words in the right order leave
little of what came back. Neither labels nor deeper blocks enter. Masks were on, so that some always is left; but a word
of another sentence leaves most of its signal, and so does a wrong order where heads look at positions. Least squares by
conjugate gradients, through the model's own attention.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaudit.models.transformers import TransformersModel

_RIDGE = 0.005
"""Of O, in units of the operator's own size (MPNet, 1.07 tokens a coordinate, ten sentences: of 240 of their exchanges
and moves 18 explain more than the right order; 24 at 0.02, 22 at 0.001 and twice the steps)."""
_STEPS = 12
"""Of conjugate gradients."""


class AttentionFit:
    """What came back to words of block 0, held against sentences.

    Args:
        model: an encoder.
        words: ids of the words.
        received: [W, 3 d] what came back to their queries, keys and values, each divided by `scale`.
        scale: [3].
    """

    def __init__(self, model: TransformersModel, words: Sequence[int], received: Tensor, scale: Tensor) -> None:
        self._model, self._scale = model, scale.float()
        self._row = {word: at for at, word in enumerate(words)}
        self._received = torch.nn.functional.normalize(received, dim=1).float().view(len(received), 3, -1)

    def __call__(self, sentences: Sequence[Sequence[int]]) -> Tensor:
        """Return [n, T], the share of each word's signal that its sentence explains.

        0 for tokens that are none of the words, and for a word that stands in a sentence twice.

        Args:
            sentences: token ids, special ones included.
        """
        row = self._table([[self._row.get(w, -1) if s.count(w) == 1 else -1 for w in s] for s in map(list, sentences)])
        mask = self._table([[0] * len(s) for s in sentences]) == 0
        ids = torch.where(mask, self._table(sentences), 0)
        asked = (row >= 0)[..., None, None]
        given = torch.where(asked, self._received[row.clamp_min(0)], 0.0)
        made, mixed = self._model.first_attention(ids, mask)
        probe = torch.zeros_like(mixed, requires_grad=True)
        with torch.enable_grad():
            back = torch.autograd.grad(mixed, made, probe, create_graph=True)

        def brought(signal: Tensor) -> Tensor:
            """Return what a signal at the mixed values brings to queries, keys and values, [n, T, 3, d]."""
            parts = torch.autograd.grad(mixed, made, signal, retain_graph=True)
            return torch.stack(parts, 2) / self._scale[:, None]

        def gathered(errors: Tensor) -> Tensor:
            """Return the transposed map, of the words asked for; nothing comes back to padding."""
            parts = torch.where(asked, errors / self._scale[:, None], 0.0).unbind(2)
            return torch.autograd.grad(back, probe, parts, retain_graph=True)[0] * mask[..., None]

        def inner(one: Tensor, other: Tensor) -> Tensor:
            return (one * other).sum((1, 2), keepdim=True)

        left = gathered(given)
        size = inner(left, gathered(brought(left))) / inner(left, left).clamp_min(1e-30)
        found, way, energy = torch.zeros_like(left), left, inner(left, left)
        for _ in range(_STEPS):
            along = gathered(brought(way)) + _RIDGE * size * way
            step = energy / inner(way, along).clamp_min(1e-30)
            found, left = found + step * way, left - step * along
            before, energy = energy, inner(left, left)
            way = left + energy / before.clamp_min(1e-30) * way
        missed = (given - brought(found)).square().sum((2, 3))
        return torch.where(row >= 0, 1 - missed, 0.0)

    def _table(self, rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([[*r, *[-1] * (longest - len(r))] for r in rows], device=self._scale.device)
