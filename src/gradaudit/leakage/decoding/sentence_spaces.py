"""Where a batch's row space holds each sentence: attention keeps sentences apart.

Let x_i be the rows of a batch, linearly independent, and D_i what comes back to their queries and keys. A direction phi
of the row space tells G phi = sum_i (x_i . phi) D_i. Per head, what attention sends back to a query is a combination of
its own sentence's keys (with weights that sum to 0: the softmax ignores a shift), and to a key one of its queries. So
if phi is orthogonal to the rows of all sentences but s, G phi lies in the span of s's keys and queries; and hardly any
other phi does, for a head is wider than a sentence has tokens. What is decoded of s tells most of that span, so these
phi are found by a generalized eigenvalue problem, as many as s has tokens. Every row of another sentence is orthogonal
to them: among r directions that the row space has, a row of s lies in as many as s has tokens, whatever the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.decoding.dropout_masks import HALF
from gradaudit.leakage.decoding.rows import MaskedInputs, Row, Search, fresh_rows, nearest
from gradaudit.progress import step

_RANK = 1e-6
"""Singular values of keys and queries below this share of the largest are rounding."""
_RIDGE = 1e-12
"""Of the generalized eigenvalue problem, in mean diagonals."""
_OTHERS, _FALL = 0.3, 4
"""Directions that lose more of their energy outside than this share of it are of no use; and how fast the weight falls
with what is lost."""
_WEIGHTS = ((0.5, 3.0), (0.3, 10.0), (0.5, 10.0), (0.3, 30.0), (0.7, 3.0))
"""Turn by turn: share of a sentence's directions that are sure, and the weight of what others have of them. At 40 and
64% of the rows known MPNet (b/d of 0.67) is served best by few at a large weight, MiniLM (0.80) by more at a small
one."""
_PLAIN, _DRAWN = 24, 6
"""Tokens a place, nearest first, tried by the plain program, and by one with an objective that is drawn (of 62 right
ones that decode 39 are among the first 24; MiniLM, 0.80); as many more with every round that found nothing."""
_BEHIND = 3
"""Places behind a sentence's last decoded row that are looked at."""
_STEPS, _ROUNDS = 48, 2


@dataclass(frozen=True)
class SentenceSpace:
    """Directions of the row space to which the rows of all other sentences are orthogonal.

    Args:
        directions: [d, n], surest first, at a scale where what each brings back has unit norm.
        lost: [n] which share of it no attention of the sentence explains.
        length: tokens that the sentence has.
    """

    directions: Tensor
    lost: Tensor
    length: int

    @classmethod
    def of(cls, received: Tensor, directions: Tensor, keys: Tensor, queries: Tensor, length: int) -> SentenceSpace:
        """Return the directions of one sentence.

        Args:
            received: [z, 2, H, h] what directions of the row space bring back to queries and to keys.
            directions: [d, z], orthogonal to what was decoded of other sentences.
            keys: [n, H, h] of the sentence's tokens, as far as they are known.
            queries: [n, H, h].
            length: tokens that it has.
        """
        outside = [
            _outside(received[:, 0], keys - keys.mean(0)),
            _outside(received[:, 1], queries),
        ]
        whole, left = (torch.cat([part.flatten(1) for part in parts], 1) for parts in (received.unbind(1), outside))
        total = whole @ whole.T
        one = torch.eye(len(total), dtype=total.dtype, device=total.device)
        lower = torch.linalg.cholesky(total + _RIDGE * total.diagonal().mean() * one)
        lost = torch.linalg.solve_triangular(lower, left, upper=False)
        values, vectors = torch.linalg.eigh(lost @ lost.T)
        at = torch.linalg.solve_triangular(lower.T, vectors, upper=True)
        return cls(directions @ at, values.clamp_min(0), length)

    def functionals(self, sure: float) -> Tensor:
        """Return [n, d] what rows of other sentences should not have, weighted by how sure that is.

        Args:
            sure: share of the sentence's directions that weigh fully.
        """
        middle = self.lost[min(int(sure * self.length), len(self.lost) - 1)].clamp_min(torch.finfo(torch.float32).eps)
        weight = (self.lost < _OTHERS) / (1 + (self.lost / middle) ** _FALL)
        weighted: Tensor = weight.sqrt()[:, None] * self.directions.T
        return weighted


def _outside(received: Tensor, spanned: Tensor) -> Tensor:
    """Return [z, H, h] what of received lies outside the span of [n, H, h], head by head."""
    left, values, _ = torch.linalg.svd(spanned.permute(1, 2, 0), full_matrices=False)  # [H, h, n]
    left = left * (values > _RANK * values.amax(1, keepdim=True))[:, None]
    by_head = received.transpose(0, 1)
    outside: Tensor = (by_head - by_head @ left @ left.mT).transpose(0, 1)
    return outside


def apart(inputs: MaskedInputs, functionals: Tensor) -> Tensor:
    """Return [n, r], what masked rows by their coordinates in the inputs' basis have of some functionals [n, d].

    Where a row enters with shifts of unknown sizes, these suit it best.
    """
    by = functionals @ inputs.basis
    if len(inputs.shifts):
        shift = functionals @ inputs.shifts.T
        by = by - shift @ torch.linalg.pinv(shift) @ by
    return by


def costs(inputs: MaskedInputs, spaces: Sequence[SentenceSpace], size: float, turn: int) -> list[Tensor]:
    """Return [r, r] for each sentence, what it costs a masked row of it to lie where rows of others do, in a round.

    Args:
        inputs: with r directions in its basis.
        spaces: of all sentences.
        size: of a functional of a row, squared, where the row is the sentence's own.
        turn: number of the round.
    """
    sure, weight = _WEIGHTS[turn % len(_WEIGHTS)]
    each = [apart(inputs, space.functionals(sure)) for space in spaces]
    own = [by.T @ by * size * weight for by in each]
    total = torch.stack(own).sum(0)
    return [total - one for one in own]


@dataclass(frozen=True)
class Open:
    """A sentence of which rows are missing.

    Args:
        taken: positions at which rows were decoded.
        closed: its last special token is among them.
        cost: [r, r] of lying where others do, in the inputs' basis, at unit size a coordinate.
    """

    taken: frozenset[int]
    closed: bool
    cost: Tensor

    def places(self, longest: int) -> list[int]:
        """Return the positions at which a row may be missing."""
        last = max(self.taken, default=0)
        return [p for p in range(min(longest, last + 1 + _BEHIND * (not self.closed))) if p not in self.taken]


def look_by_sentence(
    inputs: MaskedInputs,
    how: Search,
    found: Sequence[Row],
    sentences: Sequence[Open],
    idle: int,
    rng: torch.Generator,
) -> list[Row]:
    """Return further rows that a round of programs finds at the places of sentences at which none was decoded.

    Args:
        inputs: the masked inputs.
        how: how far to look.
        found: rows that are known.
        sentences: those with rows missing.
        idle: rounds before it that found nothing.
        rng: draws objectives.
    """
    known: dict[tuple[int, int], list[Row]] = {}
    for row in found:
        known.setdefault((row.position, row.token), []).append(row)
    more: list[Row] = []
    tokens = _Tokens(inputs, how)
    one = torch.eye(inputs.basis.shape[1], dtype=inputs.basis.dtype, device=inputs.basis.device)
    for sentence in sentences:
        leaning = torch.linalg.inv(one + sentence.cost)
        ranked = [tokens.nearest(p, leaning, _PLAIN * (1 + idle)) for p in sentence.places(tokens.longest)]
        if not ranked:
            continue
        for count, drawn in ((_PLAIN, None), (_DRAWN, rng)):
            some = [(p, ids[: count * (1 + idle)], clean[: count * (1 + idle)]) for p, ids, clean in ranked]
            owner = [(p, token) for p, ids, _ in some for token in ids.tolist()]
            every = torch.cat([clean for *_, clean in some])
            start = inputs.relaxed(every, leaning=leaning, rng=drawn, steps=_STEPS, rounds=_ROUNDS) > HALF
            kept, inside = inputs.accepted(every, start, how.rate)
            which = torch.where(inside)[0].tolist()
            passed = [(owner[n], kept[n], every[n]) for n in which]
            more += fresh_rows(inputs, how, known, passed, len(found) + len(more))
        step("decode: rows", len(found) + len(more), inputs.span.rank)
    return more


class _Tokens:
    """Tokens near the row space at each position, to be ranked for a sentence.

    Args:
        inputs: the masked inputs.
        how: how far to look.
    """

    def __init__(self, inputs: MaskedInputs, how: Search) -> None:
        self._inputs, self._how = inputs, how
        self._prefix = inputs.model.special.prefix[:1]
        self.longest = min(how.max_length, inputs.model.max_length)
        self._at: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def nearest(self, position: int, leaning: Tensor, count: int) -> tuple[int, Tensor, Tensor]:
        """Return a position, ids [n] of the tokens there that pay least for lying where a sentence does, and rows."""
        if position not in self._at:
            ids = self._inputs.near(position, nearest(self._inputs, self._how))
            if position == 0 and self._prefix:
                ids = torch.tensor(self._prefix, device=ids.device)
            clean = self._inputs.clean(position, ids)
            at = torch.nn.functional.normalize(clean, dim=1) @ self._inputs.basis
            self._at[position] = ids, clean, at
        ids, clean, at = self._at[position]
        best = ((at @ leaning) * at).sum(1).topk(min(count, len(ids))).indices
        return position, ids[best], clean[best]
