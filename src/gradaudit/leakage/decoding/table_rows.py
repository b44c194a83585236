"""Rows with their masks from the embedding tables' own gradients, however many tokens there are.

A word's and a position's vectors add up to e, which is normalized, n = (e - mean) / std, and masked: m * (g n + b). Let
u be the gradient at n. Behind dropout it is zero where the mask is, and the LayerNorm's derivative brings to e

    (u - mean(u) - n mean(u n)) / std,

which at the dropped coordinates is a line over n: two numbers explain one coordinate in ten, exactly. The word table's
row is this gradient if the word stands in the batch once, and so is the position table's where one word stands. A sum
of two rows has no such line, or a far shorter one: of a word twice at one position, where both masks dropped. So a line
of the right length tells that a word stands once, where, and its mask; what is told is taken out of both tables, which
may leave a word or a position with one row more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradaudit.leakage.decoding.rows import MaskedInputs, Row
from gradaudit.types import Observation

_ROUNDED = 16.0
"""Dropped coordinates lie this near their line, in epsilons of the row's rms (right ones, MiniLM and MPNet, 230 words:
at most 0.9)."""
_LEAST = 8
"""So many coordinates on a line are none by chance: of 768 one in 1,600 lies this near a line through two others."""
_ENOUGH = 0.5
"""And at least this share of what one mask drops: 24 of 38 are the fewest of 110 (MiniLM), and two masks of rate p drop
a share p of it together."""
_APART = 2
"""The right position has so many times the coordinates of any other (at least 4 times, as above). Of rounded or zeroed
entries many lie on the same line everywhere."""
_GONE = 1e-3
"""What is left of a row below this share of it is rounding of what was taken out."""
_CHANCE = 0.01
"""Coordinates that may lie on a line by chance: a type with fewer digits than float32's tells none."""
_SMALL, _PAIRS = 5, 64
"""The line is drawn through pairs of the smallest fifth: dropped coordinates are among these, for a gradient of zero
leaves the two means alone; one pair in four or more is of two dropped ones."""
_CHUNK = 64
"""Words tried together: bounds memory."""


@torch.no_grad()
def rows_of_tables(seen: Observation, inputs: MaskedInputs, rng: torch.Generator) -> list[Row]:
    """Return the rows of the batch that the word and the position table tell.

    Args:
        seen: an observation.
        inputs: masked inputs of its model, with the batch's words; where their span is not full, rows must lie in it.
        rng: draws pairs of coordinates.

    Returns:
        None of them where a table was not sent or says more than the batch's words, where dropout does not follow the
        LayerNorm, or where no line is exact.
    """
    model, ids, rate = seen.model, inputs.words, seen.knowledge.dropout
    names = [name for group in ("word", "position") for name in model.group(group) if name in seen.tensors]
    behind = model.absolute_positions and not model.dropout_before_norm
    if ids is None or len(names) != 2 or seen.kind != "gradient" or not behind:
        return []
    words, places = (seen.tensors[name] for name in names)
    near = _ROUNDED * torch.finfo(words.dtype).eps
    if words.shape[1] != model.width or near * model.width > _CHANCE:
        return []
    touched = torch.where(places[model.first_position_row :].any(1))[0]
    places = places[model.first_position_row :][: int(touched.max()) + 1 if len(touched) else 0]
    found = _Tables(inputs, ids, words[ids].double(), places.double(), near, rate).told(rng)
    if not found:
        return []
    clean = torch.cat([inputs.clean(at, ids[word : word + 1]) for word, at, _ in found])
    kept, inside = inputs.accepted(clean, torch.stack([mask for _, _, mask in found]), rate or 0.0)
    which = torch.where(inside)[0].tolist()
    return [Row(int(ids[found[n][0]]), found[n][1], kept[n], clean[n]) for n in which]


class _Tables:
    """Both tables' gradients, and what is taken out of them.

    Args:
        inputs: masked inputs of a model.
        ids: [W] the batch's words.
        words: [W, d] their rows.
        places: [T, d] the positions' rows.
        near: dropped coordinates lie this near their line, in rms of a row.
        rate: of dropout; None where it is not known, and is what most words that are told show.
    """

    def __init__(
        self, inputs: MaskedInputs, ids: Tensor, words: Tensor, places: Tensor, near: float, rate: float | None
    ) -> None:
        parts = inputs.model.first_input_parts()
        self._sums = parts.words[ids].double()
        self._positions, self._near = parts.positions.double(), near
        self._words, self._places = words.clone(), places.clone()
        self._sizes = [rows.square().mean(1).sqrt() for rows in (words, places)]
        self._dropped = None if rate is None else rate * words.shape[1]

    def told(self, rng: torch.Generator) -> list[tuple[int, int, Tensor]]:
        """Return words (as places in their list), positions and masks [d], until nothing more is told."""
        found: list[tuple[int, int, Tensor]] = []
        while True:
            before = len(found)
            for word, at, kept in self._alone_of_words(rng):
                found.append((word, at, kept))
                self._places[at] -= self._words[word]
                self._words[word] = 0.0
            for at in range(len(self._places)):
                for word, kept in self._alone_of_places(at, rng):
                    found.append((word, at, kept))
                    self._words[word] -= self._places[at]
                    self._places[at] = 0.0
            if len(found) == before:
                return found

    def _alone_of_words(self, rng: torch.Generator) -> list[tuple[int, int, Tensor]]:
        """Return the words of which one row is left, where it stands, and its mask."""
        left = self._left(self._words, self._sizes[0])
        found: list[tuple[int, int, Tensor]] = []
        for some in torch.split(left, _CHUNK):
            rows, sizes = self._words[some], self._sizes[0][some]
            lines = [self._line(rows, sizes, self._normed(some, at), rng) for at in range(len(self._places))]
            counts = torch.stack([(~kept).sum(1) for kept in lines])  # [T, n]
            for n, at in _winners(counts):
                found.append((int(some[n]), at, lines[at][n]))
        if self._dropped is None and found:
            self._dropped = float(torch.stack([(~kept).sum() for *_, kept in found]).median())
        return [one for one in found if self._enough(one[2])]

    def _enough(self, kept: Tensor) -> bool:
        return int((~kept).sum()) >= _ENOUGH * (self._dropped or 0.0)

    def _alone_of_places(self, at: int, rng: torch.Generator) -> list[tuple[int, Tensor]]:
        """Return the one word whose row alone is left of a position's, if there is one, and its mask."""
        left = self._left(self._words, self._sizes[0])
        if not len(left) or not len(self._left(self._places[at : at + 1], self._sizes[1][at : at + 1])):
            return []
        kept = []
        for some in torch.split(left, _CHUNK):
            row, size = self._places[at].expand(len(some), -1), self._sizes[1][at].expand(len(some))
            kept.append(self._line(row, size, self._normed(some, at), rng))
        masks = torch.cat(kept)
        told = [(int(left[word]), masks[word]) for _, word in _winners((~masks).sum(1)[:, None])]
        return [one for one in told if self._enough(one[1])]

    @staticmethod
    def _left(rows: Tensor, sizes: Tensor) -> Tensor:
        return torch.where(rows.square().mean(1).sqrt() > _GONE * sizes)[0]

    def _normed(self, words: Tensor, at: int) -> Tensor:
        """Return [n, d] the normalized sums of words and a position."""
        plain = self._sums[words] + self._positions[at]
        plain = plain - plain.mean(1, keepdim=True)
        return plain / plain.square().mean(1, keepdim=True).sqrt()

    def _line(self, rows: Tensor, sizes: Tensor, normed: Tensor, rng: torch.Generator) -> Tensor:
        """Return [n, d] bool, the coordinates of rows that do not lie on the line on which most do."""
        few = rows.abs().topk(rows.shape[1] // _SMALL, 1, largest=False).indices
        drawn = torch.randint(few.shape[1], (2, len(rows), _PAIRS), generator=rng).to(rows.device)
        (y, z), (m, n) = ([table.gather(1, few.gather(1, one)) for one in drawn] for table in (rows, normed))
        slopes = (y - z) / torch.where(m == n, torch.inf, m - n)  # a pair of one coordinate twice tells no line
        heights = y - slopes * m
        limit = self._near * sizes[:, None]
        off = rows.gather(1, few)[:, None] - heights[..., None] - slopes[..., None] * normed.gather(1, few)[:, None]
        best = (off.abs() < limit[..., None]).sum(2).argmax(1, keepdim=True)
        kept: Tensor = (rows - heights.gather(1, best) - slopes.gather(1, best) * normed).abs() >= limit
        return kept


def _winners(counts: Tensor) -> list[tuple[int, int]]:
    """Return (column, row) where a row has enough of a column's coordinates on its line, and no other comes near."""
    most, at = counts.max(0)
    others = counts.scatter(0, at[None], 0).amax(0)
    sure = (most >= _LEAST) & (most >= _APART * others)
    return [(n, int(at[n])) for n in torch.where(sure)[0].tolist()]
