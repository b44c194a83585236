"""Whether a sentence was in a batch, by what comes back to its tokens in block 0; dropout off.

A row of block 0 does not depend on the sentence, so the space of its rows says nothing of which words belong together.
What comes back to a token does: the whole sentence makes it. So a sentence that is tried is run, and each token's own
slope is held against the columns of what was sent, which the slopes of the batch span. Those of a right sentence lie
there, under whatever labels and loss; one wrong word moves them all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaudit.leakage.decoding.mending import exchanged
from gradaudit.leakage.decoding.pairs import Pairs
from gradaudit.leakage.rowspace.deflation import Remainder, sentence_gradients
from gradaudit.models.base import TextModel

_FITS = 1e-4
"""Mean share of its slopes outside the columns below which a sentence fits: right ones are at 1e-9 or below but for
tokens that other sentences share, wrong ones mostly above 1e-2 (MiniLM, q, k and v, four sentences, in development)."""
_WORTH = 0.2
"""The same up to which it is tried whether the rank falls: a token that another sentence has in its place, too, counts
as outside, for only the sum of the two slopes was sent."""
_TURNS = 24
"""Exchanges of a proposal."""
_ALIKE = 0.5
"""Share of words in common with a proposal that was mended before from which another one is not."""
_AT_ONCE = 64
"""Sentences run together: bounds memory."""


class OwnSlopes:
    """What came back to the tokens of a batch, and how far from it is what comes back to those of a sentence.

    Args:
        model: an encoder that classifies, dropout off.
        rest: what is left of its gradient of block 0's q, k and v, or of one of them.

    Attributes:
        limit: misfit up to which it is worth to try whether a sentence can be taken out.
    """

    limit = _WORTH / _FITS

    def __init__(self, model: TextModel, rest: Remainder) -> None:
        self._model, self._rest = model, rest
        columns, _, _ = torch.linalg.svd(rest.stacked(0), full_matrices=False)
        self._columns = columns[:, : rest.span(0).rank]
        self._mended: list[set[int]] = []

    @torch.no_grad()
    def misfits(self, sentences: Sequence[tuple[int, ...]]) -> Tensor:
        """Return [n], the mean share of each one's slopes that lies outside the columns of what is left; 1 fits.

        The first special token, of which every sentence has one, does not count.

        Args:
            sentences: token ids, of any lengths.
        """
        found = torch.empty(len(sentences), dtype=torch.double, device=self._columns.device)
        order = sorted(range(len(sentences)), key=lambda n: len(sentences[n]))
        for at in range(0, len(order), _AT_ONCE):
            some = order[at : at + _AT_ONCE]
            shares = self._outside([sentences[n] for n in some])
            found[torch.tensor(some, device=found.device)] = shares.nanmean(1)
        return found / _FITS

    def mended(self, near: Sequence[Pairs], sentence: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        """Return what exchanges of single tokens make of a sentence while they help, and its misfit.

        Args:
            near: words at positions that may be put there; later ones where earlier ones do not help.
            sentence: where to start; left as it is where one much like it was mended before.
        """
        value, words = float(self.misfits([sentence])), set(sentence) - self._model.special.ids
        if any(len(words & other) > _ALIKE * len(words | other) for other in self._mended):
            return sentence, value
        self._mended.append(words)
        for _ in range(_TURNS):
            if value < 1:
                break
            better = next(filter(None, (self._better(some, sentence, value) for some in near)), None)
            if better is None:
                break
            sentence, value = better
        return sentence, value

    def _better(self, near: Pairs, sentence: tuple[int, ...], value: float) -> tuple[tuple[int, ...], float] | None:
        """Return the best that exchanges make of a sentence, with its misfit; None where none of them helps.

        The best ones of several places are tried together, too: each turn runs every exchange.
        """
        places = range(len(self._model.special.prefix), len(sentence))
        tried: dict[tuple[int, ...], int] = {}
        for place in places:
            there = near.tokens[near.positions == place].tolist()
            for one in exchanged(sentence, place, there, self._model.special.suffix[-1:]):
                if len(one) <= self._model.max_length:
                    tried.setdefault(one, place)
        if not tried:
            return None
        values = self.misfits(list(tried)).tolist()
        ranked = sorted((far, place, one) for (one, place), far in zip(tried.items(), values, strict=True))
        best = ranked[0]
        if best[0] >= value:
            return None
        together, done = [best[2]], {best[1]}
        for far, place, one in ranked:
            if far < value and place not in done and len(one) == len(best[2]) == len(sentence):
                done.add(place)
                together.append((*together[-1][:place], one[place], *together[-1][place + 1 :]))
        values = self.misfits(together).tolist()
        return min(zip(together, values, strict=True), key=lambda found: found[1])

    def _outside(self, sentences: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the share of each token's slope that lies outside, [n, T], without the first; nan behind the end."""
        model, device = self._model, self._columns.device
        lengths = torch.tensor([len(s) for s in sentences], device=device)
        real = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
        ids = torch.tensor([[*s, *[0] * (real.shape[1] - len(s))] for s in sentences], device=device)
        rows = torch.stack([model.first_inputs(place, ids[:, place]) for place in range(real.shape[1])], 1)
        duals = torch.linalg.pinv((rows * real[..., None]).double())
        # under any loss of the probabilities a gradient is a sum of differences between the slopes of two labels
        labels = torch.eye(model.spec.labels, device=device)
        slopes = torch.stack([self._own(sentences, labels[0] - other) @ duals for other in labels[1:]], 1)
        slopes = slopes.mT[:, :, len(model.special.prefix) :]  # [n, labels - 1, T, out]
        beside = slopes - (slopes @ self._columns) @ self._columns.T
        if len(labels) > 2:
            weights = _least(beside.flatten(2), slopes.flatten(2))[:, :, None, None]
            slopes, beside = ((some * weights).sum(1, keepdim=True) for some in (slopes, beside))
        shares = beside[:, 0].square().sum(2) / slopes[:, 0].square().sum(2).clamp_min(1e-300)
        return torch.where(real[:, len(model.special.prefix) :], shares, torch.nan)

    def _own(self, sentences: Sequence[tuple[int, ...]], weights: Tensor) -> Tensor:
        own = sentence_gradients(self._model, sentences, weights, self._rest.left)
        return torch.cat([g.double() / self._rest.whole[key] for key, g in own.items()], 1)


def _least(part: Tensor, whole: Tensor) -> Tensor:
    """Return weights [n, c] of which the weighed sum of parts [n, c, m] is least beside that of the wholes."""
    inner, outer = part @ part.mT, whole @ whole.mT
    lower = torch.linalg.cholesky(outer + 1e-12 * torch.diag_embed(outer.diagonal(dim1=1, dim2=2)))
    inner = torch.linalg.solve_triangular(lower, inner, upper=False)
    inner = torch.linalg.solve_triangular(lower, inner.mT, upper=False)
    least: Tensor = torch.linalg.solve_triangular(lower.mT, torch.linalg.eigh(inner)[1][..., :1], upper=True)
    return least[..., 0]
