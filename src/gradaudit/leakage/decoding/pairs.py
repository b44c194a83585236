"""Which word stood where, with dropout off: the signals that explain block 0's gradient and split fewest words.

Without dropout x(t, p) = LN(word t + position p), so the rows of two words at the same two positions are dependent and
every batch word fits every linked position: the row space alone cannot tell. The gradient says more. It is
dW = sum over pairs of E(t, p) x(t, p)^T with one signal E a pair, and x(t, p) = a (g w_t + g p_p) + b with the scale a
of the LayerNorm. Words, positions and bias are independent directions, so dW gives, without any choice, what every word
and every position received in all:

    M_t = sum over p of a E(t, p),    N_p = sum over t of a E(t, p).

A transport problem: who delivered what to whom. A word that occurs once brings M_t whole to its one position, so
N_p = M_t1 + M_t2 + ... is a sum of a few of the words' own vectors, and these are as good as orthogonal in the 3 d
numbers of q, k and v. Words that occur several times split. So the flows a E(t, p) = c M_t + G(t, p), 0 <= c <= 1, are
looked for whose parts G, off the word's own direction, have the least total norm: a convex problem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.subspace import Span, cut_by_gap
from gradaudit.leakage.rowspace.vocabulary import VocabularyCheck, near_tokens
from gradaudit.models.base import TextModel

_PUSH = 0.05
"""Soft threshold, in sizes of a typical word: 0.03 and 0.1 place alike."""
_ROUNDING, _UNRELATED = 5e-6, 0.05
"""Residuals of right rows in float32 are at most about the first, those of unrelated rows at least the second."""


@dataclass(frozen=True)
class Pairs:
    """Tokens at positions that lie in block 0's span.

    Args:
        positions: [n].
        tokens: [n] ids.
        rows: [n, d] their inputs, float64.
    """

    positions: Tensor
    tokens: Tensor
    rows: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, chosen: Tensor | slice) -> Pairs:
        """Return the chosen ones (indices, a mask or a slice)."""
        return Pairs(self.positions[chosen], self.tokens[chosen], self.rows[chosen])


def framed(model: TextModel, first: Span) -> Span:
    """Return block 0's span with the row of the special token that every sentence starts with.

    Keys alone hold differences of a sentence's rows, as the softmax ignores a shift; with one of these rows, all.

    Args:
        model: an encoder, dropout off.
        first: block 0's span.
    """
    if first.roles != ("k",) or not model.special.prefix or not model.absolute_positions:
        return first
    row = model.first_inputs(0, torch.tensor(model.special.prefix[:1], device=first.basis.device)).double()[0]
    more = row - first.basis @ (first.basis.T @ row)
    return replace(first, basis=torch.cat([first.basis, (more / more.norm())[:, None]], 1), rank=first.rank + 1)


def candidate_pairs(model: TextModel, first: Span, longest: int) -> Pairs:
    """Return every (position, token) whose input lies in the span: at least all that occurred.

    Special tokens are taken where they may stand: the first one at position 0 alone, the last one after it.

    Args:
        model: an encoder, dropout off.
        first: block 0's span.
        longest: positions looked at, until one holds no token.
    """
    check = VocabularyCheck(model.first_input_parts(), first)
    special = model.special
    inner_never = torch.tensor(sorted(special.ids - set(special.suffix)), dtype=torch.long, device=first.basis.device)
    positions, tokens, rows = [], [], []
    for position in range(min(longest, model.max_length)):
        near = near_tokens(model, check.rough(position), first, position, _UNRELATED)
        ids = near.below(cut_by_gap(near.residuals, _ROUNDING, _UNRELATED)).ids
        opening = position == 0 and bool(special.prefix)
        ids = ids[ids == special.prefix[0]] if opening else ids[~torch.isin(ids, inner_never)]
        if len(ids) == 0:
            break
        positions.append(torch.full_like(ids, position))
        tokens.append(ids)
        rows.append(model.first_inputs(position, ids).double())
    if not tokens:
        none = torch.zeros(0, dtype=torch.long, device=first.basis.device)
        return Pairs(none, none, torch.zeros((0, len(first.basis)), dtype=torch.double, device=first.basis.device))
    return Pairs(torch.cat(positions), torch.cat(tokens), torch.cat(rows))


@torch.no_grad()
def placed_signals(model: TextModel, gradient: Tensor, found: Pairs, steps: int = 200) -> Tensor | None:
    """Return [n, out], the signal of each candidate pair; None when words and positions are not independent.

    Least total norm of what leaves each word's own direction, by operator splitting: flows that meet the marginals (a
    closed form), and a soft threshold.

    Args:
        model: an encoder, dropout off.
        gradient: [out, d] of block 0.
        found: candidate pairs.
        steps: splitting steps; the marginals are met to 5e-4 after 200.
    """
    parts = model.first_input_parts()
    words, row = torch.unique(found.tokens, return_inverse=True)
    column = found.positions
    places = int(column.max()) + 1
    each = torch.cat([parts.words[words], parts.positions[:places]]).double()
    each = (each - each.mean(1, keepdim=True)) * parts.weight.double()
    directions = torch.cat([each, parts.bias.double()[None]])
    if len(directions) > gradient.shape[1] or int(torch.linalg.matrix_rank(directions, rtol=1e-6)) < len(directions):
        return None
    received = torch.linalg.lstsq(directions.T, gradient.T).solution
    # few of the out directions are used: the rest is rounding
    _, values, vh = torch.linalg.svd(received, full_matrices=False)
    used = vh[values > 1e-6 * values[0]]
    by_word, by_place = ((m @ used.T).float() for m in (received[: len(words)], received[len(words) : -1]))
    flows = _transported(by_word, by_place, row, column, steps)
    inner = parts.words[words[row]] + parts.positions[column]
    centered = (inner - inner.mean(1, keepdim=True)).double()
    scale = (centered.square().mean(1, keepdim=True) + parts.eps).rsqrt()
    placed: Tensor = flows.double() @ used / scale
    return placed


def _transported(by_word: Tensor, by_place: Tensor, row: Tensor, column: Tensor, steps: int) -> Tensor:
    """Return [n, k], the pairs' flows that meet both marginals and leave the words' own directions least.

    Args:
        by_word: [W, k] what each word delivers.
        by_place: [P, k] what each position receives.
        row: [n] word of each pair that may carry a flow.
        column: [n] position of each pair.
        steps: splitting steps.
    """
    count, places = len(by_word), len(by_place)
    size = by_word.norm(dim=1)[:, None, None]
    along = by_word[:, None] / size.clamp_min(1e-30)
    allowed = torch.zeros((count, places, 1), dtype=torch.bool, device=by_word.device)
    allowed[row, column] = True
    threshold = _PUSH * size.median()
    kept = torch.zeros((count, places, by_word.shape[1]), dtype=by_word.dtype, device=by_word.device)
    dual = torch.zeros_like(kept)
    for _ in range(steps):
        flows = kept - dual
        short, owed = by_word - flows.sum(1), by_place - flows.sum(0)
        flows = flows + short[:, None] / places + (owed / count - short.sum(0) / (count * places))[None]
        dual = flows + dual
        part = (dual * along).sum(2, keepdim=True)
        off = dual - part * along
        off = off * (1 - threshold / off.norm(dim=2, keepdim=True).clamp_min(1e-30)).clamp_min(0)
        kept = torch.where(allowed, torch.minimum(part.clamp_min(0), size) * along + off, 0.0)
        dual = dual - kept
    return kept[row, column]


@torch.no_grad()
def sparse_signals(gradient: Tensor, rows: Tensor, basis: Tensor, steps: int = 60) -> Tensor:
    """Return [n, out], the signals of least total norm that explain a gradient.

    Minimizes sum_c ||E_c|| with E^T rows = gradient by reweighted least squares (weights ||E_c||, smoothed by an eps
    that falls from 1 by 0.9 a step): the convex problem, whose solution does not depend on the start. Sharper penalties
    find sparser answers and wrong ones: a batch may hold more pairs than the rank of their rows.

    Args:
        gradient: [out, d], its rows in the span of `rows`.
        rows: [n, d] candidate inputs, linearly dependent.
        basis: [d, r] orthonormal basis of the gradient's row space.
        steps: reweighting steps.
    """
    short, target = rows @ basis, (gradient @ basis).T
    weights = torch.ones(len(rows), dtype=rows.dtype, device=rows.device)
    signals = torch.zeros((len(rows), len(gradient)), dtype=rows.dtype, device=rows.device)
    identity = torch.eye(basis.shape[1], dtype=rows.dtype, device=rows.device)
    eps = 1.0
    for _ in range(steps):
        normal = (short * weights[:, None]).T @ short
        normal = normal + 1e-13 * normal.diagonal().mean() * identity
        signals = weights[:, None] * (short @ torch.linalg.solve(normal, target))
        square = signals.square().sum(1)
        square = square / square.max().clamp_min(1e-300)
        weights = (square + eps**2).sqrt()
        eps = max(eps * 0.9, 1e-5)
    return signals
