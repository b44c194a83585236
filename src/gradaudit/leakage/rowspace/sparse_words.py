"""Words from fewer directions than there are tokens: all are combinations of the same few rows of a known dictionary.

The gradient of an adapter's A [r, d] is (D B)^T X: r combinations of the inputs X of the batch's tokens. With more
tokens than directions no word lies in their span, and yet the words are determined. What enters block 0 is known for
every token of the vocabulary, and r directions of every adapted matrix are made of the same n of these rows. That is
sparse approximation of several signals at once: generically no other n words explain the directions while

    n <= (d + m - 1) / 2        (m independent directions; Chen and Huo, 2006, theorem 2.4)

Of coefficients that were not made for it far more words are told: a wrong set of n words explains m directions by
chance with a probability of about (error / size)^(m (d - n)), and there are (V over n) sets.

Words are found one by one by the rank-aware order recursive matching pursuit of Davies and Eldar (2012): the word whose
part off those taken lies nearest to what they leave of the directions, all directions counting alike. A wrong word on
the way does no harm. Once all right ones are there, the wrong ones' coefficients are rounding, and they are dropped.

With absolute positions x(t, p) = weight (w_t + p) / s + bias: positions and bias are directions of their own and are
taken out first, each at the cost of one of the d.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.errors import NotSupportedError
from gradaudit.leakage.rowspace.ranking import accepted, expected_by_chance
from gradaudit.leakage.rowspace.subspace import stack
from gradaudit.leakage.uneven.entries import entries
from gradaudit.leakage.uneven.steps import PlainStep
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import NamedWord, Observation

_ROUNDED = 2e-7
"""Error of an entry of a gradient that float32 summed, relative to the root mean square of its line."""
_CLEAR = 10.0
"""A direction is known where it is so many times the largest that errors alone would make."""
_FLOOR = 0.05
"""A word of which less than this share is left resembles those already taken too much to be judged by it."""
_MOST = 0.9
"""Words taken at most, as a share of the dimensions: with as many words as dimensions anything is explained."""
_EXPLAINED = 4.0
"""Squared residuals per degree of freedom, in squared errors, below which words explain the directions (measured: 0.1
to 1.6 of all words, more than 1,000 where one is missing; SmolLM2)."""
_IDLE = 25.0
"""A word whose coefficients each explain less than so many squared errors is none (measured: 1 of wrong words, 10^6 and
more of right ones)."""
_APART = 100.0
"""Any other word in a word's place must cost this much of chi^2 for the word to be certain."""
_CHANCE = math.log(1e-6)
"""Sets of words expected to explain the directions by chance for a word to be certain, as a logarithm."""
_PLACES = (24, 96)
"""Positions taken out: most sentences are shorter than the first, and each costs a dimension."""
_NO_STEP = (
    "the adapters' B is still zero (no step was made with them), so that their A has no gradient; an update after the "
    "first step carries signal"
)
_NOT_SENT = (
    "attack 'decode' needs the gradients of adapters on q, k or v of block 0, and none of them is in this update"
)


@dataclass(frozen=True)
class SparseWords:
    """Words that explain directions.

    Args:
        words: in the order in which they were found, special tokens left out; `certain` where no other word would do in
            its place, and no other set of as few explains the directions but by a chance of one in a million.
        explained: whether the words explain everything up to rounding.
        directions: independent ones that were sent.
        exhausted: whether they are fewer than were sent lines: then the batch has no more tokens than directions.
        limit: what holds where words end, in one sentence.
    """

    words: tuple[NamedWord, ...]
    explained: bool
    directions: int
    exhausted: bool
    limit: str


@torch.no_grad()
def adapter_words(seen: Observation, level: float) -> SparseWords:
    """Return the words of block 0 that the gradients of adapters are made of.

    Args:
        seen: one gradient of adapters on q, k or v of block 0, or one step of plain SGD.
        level: where not everything is explained, share of the words returned that may be wrong.

    Raises:
        NotSupportedError: nothing of them was sent, or a change that does not show the gradient.
    """
    changes = entries(seen, 0) if seen.kind == "delta" else None
    if seen.kind == "delta" and (changes is None or not isinstance(changes.step, PlainStep)):
        raise NotSupportedError(
            "adapters are read from one gradient or one step of plain SGD so far, and this change was made otherwise"
        )
    stacked, _ = stack(seen, 0)
    if stacked is None:
        if any(seen.role(0, role) for role in "qkv"):
            return SparseWords((), False, 0, False, _NO_STEP)
        raise NotSupportedError(_NOT_SENT)
    sent, error = stacked, torch.zeros_like(stacked[:, :1])
    if changes is not None:
        sent, error = changes.sent, changes.spread.square().mean(1, keepdim=True).sqrt()
    sent = sent[sent.any(1)]
    return sparse_words(seen.model, sent, error, level)


@torch.no_grad()
def sparse_words(model: TextModel, sent: Tensor, error: Tensor, level: float) -> SparseWords:
    """Return the words of block 0 that directions are made of.

    Args:
        model: the model.
        sent: [k, d] gradients of matrices that read block 0's input.
        error: [k, 1] standard deviation of an entry's error by line, beside float32's own.
        level: where not everything is explained, share of the words returned that may be wrong.
    """
    sent = sent.double()
    lines = sent.square().mean(1, keepdim=True)
    columns = sent.square().mean(0) / lines.mean()
    unit = (_ROUNDED**2 * lines + error.double().square()).sqrt()
    # sums of columns with outliers round coarser: counted in units of their own they are even
    scale = 1 / (1 + columns).sqrt()
    found: SparseWords | None = None
    for places in _PLACES if model.absolute_positions else (0,):
        found = _Pursuit(model, sent / unit * scale, scale, places).words(level)
        if found.explained:
            break
    assert found is not None
    return found


class _Pursuit:
    """A dictionary and directions in units of their errors, off what positions bring.

    Args:
        model: the model.
        sent: [k, d].
        scale: [d] by which the columns were multiplied.
        places: positions taken out.
    """

    def __init__(self, model: TextModel, sent: Tensor, scale: Tensor, places: int) -> None:
        parts = model.first_input_parts()
        words, beside = parts.words.double(), parts.positions[:places].double()
        if parts.centered:
            words, beside = words - words.mean(1, keepdim=True), beside - beside.mean(1, keepdim=True)
        by = parts.weight.double() * scale
        beside = torch.cat([beside * by, (parts.bias.double() * scale)[None]])
        beside = torch.nn.functional.normalize(beside[beside.any(1)], dim=1)
        self.out = torch.linalg.qr(beside.T).Q if len(beside) else beside.T
        self.rows = self._off(words * by)
        self.sent = self._off(sent)
        self.free = sent.shape[1] - self.out.shape[1]
        edge = len(sent) ** 0.5 + self.free**0.5
        _, values, directions = torch.linalg.svd(self.sent, full_matrices=False)
        self.directions = directions[values > _CLEAR * edge]
        self.size = float(self.sent.square().mean().sqrt())
        special = model.special
        self.special, self.never = special.ids, sorted(special.ids - {*special.prefix, *special.suffix})

    def _off(self, rows: Tensor) -> Tensor:
        return rows - (rows @ self.out) @ self.out.T

    def words(self, level: float) -> SparseWords:
        """Return the words that explain the directions; those that stand out where none do."""
        count = len(self.directions)
        if count == 0:
            return SparseWords((), False, 0, False, "nothing of the adapters stands above its errors")
        taken, expected = self._taken()
        used, own, chi2 = self._held(taken)
        used = [word for word, one in zip(used, own.tolist(), strict=True) if one > _IDLE]
        if used:
            _, _, chi2 = self._held(used)
        exhausted = count < len(self.sent)
        told = f"{count} directions, {self.free} dimensions"
        if not used or chi2 > _EXPLAINED:
            first = taken[: accepted(expected, level)]
            limit = f"adapters: no {len(taken)} words explain the {told}: there are more, or dropout changed their rows"
            return SparseWords(self._named(first, [False] * len(first)), False, count, exhausted, limit)
        few = self._by_chance(len(used)) < _CHANCE
        certain = [few and cost > _APART for cost in self._apart(used).tolist()]
        limit = f"adapters: {len(used)} words explain the {told}, {sum(certain)} of them for certain"
        return SparseWords(self._named(used, certain), True, count, exhausted, limit)

    def _named(self, tokens: Sequence[int], certain: Sequence[bool]) -> tuple[NamedWord, ...]:
        both = zip(tokens, certain, strict=True)
        return tuple(NamedWord(token, certain=sure) for token, sure in both if token not in self.special)

    def _by_chance(self, words: int) -> float:
        """Return the logarithm of how many sets of so many words explain the directions by chance."""
        every = len(self.rows)
        sets = math.lgamma(every + 1) - math.lgamma(words + 1) - math.lgamma(every - words + 1)
        return sets - len(self.directions) * max(self.free - words, 0) * math.log(max(self.size, 1.0))

    def _taken(self) -> tuple[list[int], list[float]]:
        """Return words until nothing is left of the directions, and how many would score as high by chance."""
        rows, left, sent = self.rows, self.directions, self.sent
        along, size = rows @ left.T, rows.square().sum(1)
        length, units = size.clone(), rows[:0]
        taken: list[int] = []
        expected: list[float] = []
        barred = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        barred[self.never] = True
        while len(taken) < _MOST * self.free:
            if float(sent.square().sum()) < _EXPLAINED * sent.shape[0] * (self.free - len(taken)):
                break
            step(f"words of adapters: {len(taken)}", len(taken))
            turn, values, _ = torch.linalg.svd(left, full_matrices=False)
            whole = values > 1e-6
            score = (along @ (turn[:, whole] / values[whole])).square().sum(1)
            score = score / length.maximum(_FLOOR * size).clamp_min(1e-300)
            expected.append(expected_by_chance(score[~barred]))
            taken.append(int(torch.where(barred, -1.0, score).argmax()))
            barred[taken[-1]] = True
            unit = rows[taken[-1]]
            for _ in range(2):  # once more for what rounding leaves
                unit = unit - (unit @ units.T) @ units
            unit = unit / unit.norm()
            units = torch.cat([units, unit[None]])
            part = rows @ unit
            length = length - part.square()
            along = along - part[:, None] * (left @ unit)
            left = left - (left @ unit)[:, None] * unit
            sent = sent - (sent @ unit)[:, None] * unit
        return taken, expected

    def _held(self, words: list[int]) -> tuple[list[int], Tensor, float]:
        """Return words with what each explains, in squared errors a direction, and what they leave of all."""
        rows = self.rows[words]
        q, t = torch.linalg.qr(rows.T)
        inside = self.sent @ q
        signals = torch.linalg.solve_triangular(t, inside.T, upper=True)
        inverse = torch.linalg.solve_triangular(t, torch.eye(len(words), dtype=t.dtype, device=t.device), upper=True)
        own = signals.square().mean(1) / inverse.square().sum(1)
        free = max(self.free - len(words), 1) * len(self.sent)
        return words, own, float((self.sent - inside @ q.T).square().sum()) / free

    def _apart(self, words: list[int]) -> Tensor:
        """Return [n], by how much chi^2 grows at least with another word in each one's place."""
        rows = self.rows[words]
        q, t = torch.linalg.qr(rows.T)
        inverse = torch.linalg.solve_triangular(t, torch.eye(len(words), dtype=t.dtype, device=t.device), upper=True)
        # a word's part that no other word has
        lone = inverse @ q.T
        lone = lone / lone.norm(dim=1, keepdim=True)
        strength = (self.sent @ lone.T).square().sum(0)
        along = self.rows @ lone.T
        outside = self.rows - (self.rows @ q) @ q.T
        beside = along.square()
        like = beside / (beside + outside.square().sum(1, keepdim=True)).clamp_min(1e-300)
        like[words] = 0
        like[self.never] = 0
        least: Tensor = strength * (1 - like.max(0).values)
        return least
