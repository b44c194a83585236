"""Which tokens of the whole vocabulary lie near block 0's span, at any position."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.models.base import FirstInputs, TextModel


class VocabularyCheck:
    """Distance of every vocabulary token, at any position, from block 0's span.

    With x = weight * (w + p) / s + bias, both |x|^2 and |R^T x|^2 split into products of words and of positions that
    are computed once, so a position costs three products of the vocabulary with a vector. The split loses half the
    digits: it only sorts out, and `residuals` measures what is left anew, from the model itself.

    Args:
        parts: the model's block-0 inputs in parts.
        span: block 0's span.
    """

    def __init__(self, parts: FirstInputs, span: Span) -> None:
        basis = span.basis.to(parts.words.dtype)
        if span.scale is not None:
            scale = span.scale.to(parts.words.dtype)
            parts = replace(parts, weight=parts.weight * scale, bias=parts.bias * scale)
        words, positions = parts.words, parts.positions
        if parts.centered:
            words = words - words.mean(1, keepdim=True)
            positions = positions - positions.mean(1, keepdim=True)
        scaled = parts.weight * positions
        self._parts, self._positions, self._scaled = parts, positions, scaled
        self._words = words
        self._word_square = words.square().sum(1)
        squared = parts.weight.square()
        self._scaled_square = words.square() @ squared
        self._word_bias = words @ (parts.weight * parts.bias)
        self._word_basis = words @ (parts.weight[:, None] * basis)
        self._position_basis = scaled @ basis
        self._bias_basis = parts.bias @ basis
        self._bias_square = parts.bias.square().sum()
        self._inside_square = self._word_basis.square().sum(1)
        self._inside_bias = self._word_basis @ self._bias_basis
        # two [V, d] x [d, 1] products a position; done together they are one pass over the vocabulary
        self._pair = torch.stack([positions, positions * squared], 2)

    @torch.no_grad()
    def rough(self, position: int) -> Tensor:
        """Return [V] residuals at one position, good to about 1e-3."""
        p = self._place(position)
        plain, weighted = (self._words @ self._pair[p]).unbind(1)
        inverse = self._inverse(plain, p)
        square = inverse.square() * (self._scaled_square + 2 * weighted + self._scaled[p].square().sum())
        square = square + 2 * inverse * (self._word_bias + (self._scaled[p] * self._parts.bias).sum())
        square = square + self._bias_square
        along = self._position_basis[p]
        inside = inverse.square() * (self._inside_square + 2 * (self._word_basis @ along) + along.square().sum())
        inside = inside + 2 * inverse * (self._inside_bias + along @ self._bias_basis)
        inside = inside + self._bias_basis.square().sum()
        tiny = torch.finfo(square.dtype).tiny
        residual: Tensor = ((square - inside).clamp_min(0) / square.clamp_min(tiny)).sqrt()
        residual = torch.where(square > tiny, residual, torch.ones_like(residual))
        return residual

    @torch.no_grad()
    def normed(self, position: int, some: Tensor) -> tuple[Tensor, Tensor]:
        """Return some coordinates [n] of every token's normalized sum of word and position, and its scale, [V, n], [V].

        Before weight and bias; good to about 1e-5.
        """
        p = self._place(position)
        inverse = self._inverse(self._words @ self._positions[p], p)
        return (self._words.index_select(1, some) + self._positions[p, some]) * inverse[:, None], inverse

    def _place(self, position: int) -> int:
        return position if len(self._positions) > 1 else 0

    def _inverse(self, products: Tensor, place: int) -> Tensor:
        """Return what the normalization divides by, as a factor, from products of words and the position: [V]."""
        square = self._word_square + 2 * products + self._positions[place].square().sum()
        return (square / self._words.shape[1] + self._parts.eps).rsqrt()


@dataclass(frozen=True)
class NearTokens:
    """Tokens whose block-0 input lies near the span at one position.

    Args:
        ids: [n] token ids, nearest first.
        residuals: [n] their residuals.
        expected: [n] what noise alone would make them.
    """

    ids: Tensor
    residuals: Tensor
    expected: Tensor

    def below(self, threshold: float) -> NearTokens:
        """Return those with a residual below the threshold."""
        keep = self.residuals < threshold
        return NearTokens(self.ids[keep], self.residuals[keep], self.expected[keep])


def near_tokens(model: TextModel, rough: Tensor, span: Span, position: int, within: float) -> NearTokens:
    """Return the tokens whose residual at one position is below `within`, measured on the model itself.

    Args:
        model: the model.
        rough: [V] residuals at this position by the vocabulary check of the same span.
        span: block 0's span.
        position: 0-based.
        within: the largest residual of interest.
    """
    return measured_tokens(model, torch.where(rough < within + 0.02)[0], span, position).below(within)


def measured_tokens(model: TextModel, ids: Tensor, span: Span, position: int) -> NearTokens:
    """Return tokens with their residuals at one position, measured on the model itself.

    Args:
        model: the model.
        ids: [n] tokens.
        span: block 0's span.
        position: 0-based.
    """
    inputs = model.first_inputs(position, ids)
    residuals = span.residual(inputs)
    order = residuals.argsort(stable=True)
    return NearTokens(ids[order], residuals[order], span.expected(inputs)[order])
