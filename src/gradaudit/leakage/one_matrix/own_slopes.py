"""Whether a sentence was in a batch, by what comes back to its tokens in block 0; dropout off.

A row of block 0 does not depend on the sentence, so the space of its rows says nothing of which words belong together.
What comes back to a token does: the whole sentence makes it. So a sentence that is tried is run, and each token's own
slope is held against the columns of what was sent, which the slopes of the batch span. Those of a right sentence lie
there, under whatever labels and loss; one wrong word moves them all.
"""

from collections.abc import Sequence
from itertools import combinations, product

import torch
from torch import Tensor

from gradaudit.leakage.decoding.mending import exchanged
from gradaudit.leakage.decoding.pairs import Pairs
from gradaudit.leakage.rowspace.deflation import Remainder, sentence_gradients
from gradaudit.models.base import TextModel
from gradaudit.progress import step

Text = tuple[int, ...]
_FITS = 1e-4
"""Mean share of its slopes outside the columns below which a sentence fits: right ones are at 1e-9 or below but for
tokens that other sentences share, wrong ones mostly above 1e-2 (MiniLM, q, k and v, four sentences, in development)."""
_WORTH = 0.2
"""The same up to which it is tried whether the rank falls: a token that another sentence has in its place, too, counts
as outside, for only the sum of the two slopes was sent."""
_TURNS = 24
"""Exchanges of a proposal."""
_STRETCH = 5
"""Words of a stretch that is turned: four words came back in two swapped pairs."""
_ALIKE = 0.8
"""Share of words in common with a proposal that was mended before from which another one is not."""
_ENTRIES = 1 << 23
"""Entries of own gradients that are held together, of sentences run together: bounds memory (64 MiB)."""


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
        self._at_once = max(1, _ENTRIES // rest.stacked(0).numel())
        self._mended: list[set[int]] = []

    @torch.no_grad()
    def misfits(self, sentences: Sequence[Text]) -> Tensor:
        """Return [n], the mean share of each one's slopes that lies outside the columns of what is left; 1 fits.

        The first special token, of which every sentence has one, does not count.

        Args:
            sentences: token ids, of any lengths.
        """
        found = torch.empty(len(sentences), dtype=torch.double, device=self._columns.device)
        order = sorted(range(len(sentences)), key=lambda n: len(sentences[n]))
        for at in range(0, len(order), self._at_once):
            some = order[at : at + self._at_once]
            shares = self._outside([sentences[n] for n in some])
            found[torch.tensor(some, device=found.device)] = shares.nanmean(1)
        return found / _FITS

    def mended(self, near: Sequence[Pairs], sentence: Text) -> tuple[Text, float]:
        """Return what other words, and words that change places, make of a sentence while they help, and its misfit.

        Args:
            near: words at positions that may be put there, the likely ones and all.
            sentence: where to start; left as it is where one much like it was mended before.
        """
        value, words = float(self.misfits([sentence])), set(sentence) - self._model.special.ids
        if any(len(words & other) > _ALIKE * len(words | other) for other in self._mended):
            return sentence, value
        self._mended.append(words)
        likely, every = near[0], near[-1]
        for turn in range(_TURNS):
            step("decode: a sentence mended", turn, _TURNS)
            if value < 1:
                break
            ways = ((self._replaced, likely), (self._moved, every), (self._replaced, every))
            for changes, pairs in ways:  # later ones where earlier ones do not help
                better = self._best(sentence, changes(pairs, sentence), value)
                if better is not None:
                    sentence, value = better
                    break
            else:
                break
        return sentence, value

    def _replaced(self, near: Pairs, sentence: Text) -> list[Text]:
        """Return a sentence with one word replaced, or made longer or shorter at its end."""
        found: list[Text] = []
        for place in range(len(self._model.special.prefix), len(sentence)):
            there = near.tokens[near.positions == place].tolist()
            found += exchanged(sentence, place, there, self._model.special.suffix[-1:])
        return [one for one in dict.fromkeys(found) if len(one) <= self._model.max_length]

    @staticmethod
    def _moved(near: Pairs, sentence: Text) -> list[Text]:
        """Return a sentence with two words in each other's place or a short stretch turned, where all may stand so."""
        may = set(zip(near.positions.tolist(), near.tokens.tolist(), strict=True))
        found = [
            (*sentence[:one], sentence[other], *sentence[one + 1 : other], sentence[one], *sentence[other + 1 :])
            for one, other in combinations(range(len(sentence)), 2)
        ]
        for start, length in product(range(len(sentence)), range(3, _STRETCH + 1)):
            some = sentence[start : start + length]
            found += [
                (*sentence[:start], *some[by:], *some[:by], *sentence[start + length :]) for by in range(1, len(some))
            ]
        return [one for one in dict.fromkeys(found) if one != sentence and may.issuperset(enumerate(one))]

    def _best(self, sentence: Text, changed: list[Text], value: float) -> tuple[Text, float] | None:
        """Return the best of changed sentences, with its misfit; None where none is better than a value.

        The best changes of different places are tried together, too: each turn runs every change.
        """
        if not changed:
            return None
        ranked = sorted(zip(self.misfits(changed).tolist(), changed, strict=True))
        if ranked[0][0] >= value:
            return None
        together, done = [ranked[0][1]], _places(sentence, ranked[0][1])
        for far, one in ranked:
            places = _places(sentence, one)
            if far < value and not places & done:
                done |= places
                together.append(tuple(one[n] if n in places else word for n, word in enumerate(together[-1])))
        values = self.misfits(together).tolist()
        return min(zip(together, values, strict=True), key=lambda found: found[1])

    def _outside(self, sentences: Sequence[Text]) -> Tensor:
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

    def _own(self, sentences: Sequence[Text], weights: Tensor) -> Tensor:
        own = sentence_gradients(self._model, sentences, weights, self._rest.left)
        return torch.cat([g.double() / self._rest.whole[key] for key, g in own.items()], 1)


def _places(sentence: Text, changed: Text) -> set[int]:
    """Return where a sentence was changed; everywhere if its length was."""
    if len(sentence) != len(changed):
        return set(range(max(len(sentence), len(changed))))
    return {n for n, (one, other) in enumerate(zip(sentence, changed, strict=True)) if one != other}


def _least(part: Tensor, whole: Tensor) -> Tensor:
    """Return weights [n, c] of which the weighed sum of parts [n, c, m] is least beside that of the wholes."""
    inner, outer = part @ part.mT, whole @ whole.mT
    lower = torch.linalg.cholesky(outer + 1e-12 * torch.diag_embed(outer.diagonal(dim1=1, dim2=2)))
    inner = torch.linalg.solve_triangular(lower, inner, upper=False)
    inner = torch.linalg.solve_triangular(lower, inner.mT, upper=False)
    least: Tensor = torch.linalg.solve_triangular(lower.mT, torch.linalg.eigh(inner)[1][..., :1], upper=True)
    return least[..., 0]
