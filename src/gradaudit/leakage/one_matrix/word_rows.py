"""What every word makes of a matrix's input: in words that anybody uses, and among the words of a guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from gradaudit.leakage.one_matrix.signal import Signal, added
from gradaudit.leakage.priors import frequent_tokens
from gradaudit.models.base import TextModel
from gradaudit.streams import stream

_AROUND, _AT = 10, 5
"""Words of the sentence in which every word of the vocabulary is tried once, and the place of it."""
_CONTEXTS, _PROBES = 4, 16
"""Sentences of random frequent words, and words tried in each, over which the effect of a place is averaged. The worst
right word of a sentence ranks 36th to 230th of 30,522 so (MiniLM, block 3, q), in a sentence of [MASK] 200th."""
_TOGETHER, _TOKENS = 96, 6144
"""Words that are tried in one sequence, and tokens of a pass: bounds memory."""


@torch.no_grad()
def rows_among(model: TextModel, signal: Signal, around: Tensor, places: Tensor, words: Tensor) -> Tensor:
    """Return what enters the matrix at some places for words tried there, each alone, [P, K, d].

    The words around stay as they are, and no other tried word is seen. Where only differences count, it is the
    difference to the first row.

    Args:
        model: the model; its rows are those without dropout.
        signal: whose matrix.
        around: [n] token ids of a sentence.
        places: [P] positions in it; the word that stands there is not seen.
        words: [P, K] token ids to try at each.
    """
    n, (count, tried) = len(around), words.shape
    each = max(1, min(tried, _TOGETHER // count))
    rest = -tried % each
    padded = torch.cat([words, words[:, :1].expand(-1, rest)], 1)
    many = padded.view(count, -1, each).transpose(0, 1).flatten(1)  # [sequences, places x each]
    at = places.repeat_interleave(each)
    slots = torch.arange(n, device=around.device)
    positions = torch.cat([slots, at])
    size = len(positions)
    allowed = torch.zeros(size, size, dtype=torch.bool, device=around.device)
    allowed[:n, :n] = slots[:, None] >= slots if model.causal else True
    allowed[n:, :n] = (slots < at[:, None]) if model.causal else (slots != at[:, None])
    allowed[n:, n:] = torch.eye(size - n, dtype=torch.bool, device=around.device)
    found = []
    for part in torch.split(many, max(1, _TOKENS // size)):
        ids = torch.cat([around.expand(len(part), n), part], 1)
        inputs = _entering(model, signal, ids, positions.expand_as(ids), allowed.expand(len(ids), -1, -1))
        rows = inputs[:, n:] - inputs[:, :1] if signal.differences else inputs[:, n:]
        found.append(signal.beside(rows).view(len(part), count, each, -1).transpose(1, 2).flatten(0, 1))
    return torch.cat(found)[:tried].transpose(0, 1)


@torch.no_grad()
def rows_of(model: TextModel, signal: Signal, sentences: Tensor) -> Tensor:
    """Return what enters the matrix, [N, n, d]; where only differences count, [N, n - 1, d] those to the first row.

    Args:
        sentences: [N, n] token ids.
    """
    parts = torch.split(sentences, max(1, _TOKENS // sentences.shape[1]))
    return signal.seen(torch.cat([_entering(model, signal, part) for part in parts]))


def _entering(
    model: TextModel, signal: Signal, ids: Tensor, positions: Tensor | None = None, allowed: Tensor | None = None
) -> Tensor:
    """Return a matrix's inputs, [B, T, d], or the values that its heads mix, [B, T, heads x width of a head]."""
    if signal.heads is None:
        rows = model.matrix_inputs(signal.keys[:1], ids, positions, allowed)[0]
    else:
        inputs = model.matrix_inputs([(signal.layer, "v")], ids, positions, allowed)[0]
        values = model.project(signal.layer, "v", inputs.flatten(0, 1))[:, signal.heads]
        rows = values.view(*ids.shape, -1)
    return rows if signal.scale is None else rows * signal.scale.to(rows)


@dataclass(frozen=True)
class WordRows:
    """The row of every word in one sentence of frequent words.

    Args:
        rows: [V, d].
        squares: [V] their square norms.
    """

    rows: Tensor
    squares: Tensor

    def beside(self, signal: Signal) -> WordRows:
        """Return what is left of them beside sentences that were taken out."""
        rows = signal.beside(self.rows)
        return WordRows(rows, rows.square().sum(-1))

    def shares(self, signal: Signal, shifts: Tensor, own: Tensor, without: Sequence[int | None]) -> Tensor:
        """Return `signal.shares` of every word moved by what each of some places adds, [P, V].

        All rows that are there are projected out once. What one of them adds to the others is one direction, which is
        put back where that row is not counted, so that no place needs a pass over the words of its own.

        Args:
            signal: the space.
            shifts: [P, d] what the places add.
            own: [n, d] rows that are there.
            without: by place, which of them is not counted.
        """
        words, moves, basis = signal.parts(self.rows), signal.parts(shifts), signal.basis.to(self.rows.dtype)
        directions, triangle = torch.linalg.qr(signal.parts(own).mT)
        duals = directions @ torch.linalg.solve_triangular(triangle.mT, torch.eye(len(own)).to(own), upper=False)
        back = torch.zeros_like(moves).mT.contiguous()  # [h, w, P]
        for at, left_out in enumerate(without):
            if left_out is not None:
                back[..., at] = F.normalize(duals[..., left_out], dim=-1)
        back_inside = basis.mT @ back
        along, moved_along = words @ directions, moves @ directions
        inside = words @ basis - along @ (directions.mT @ basis)
        moved_inside = moves @ basis - moved_along @ (directions.mT @ basis)
        put_back = words @ back + _diagonal(moves @ back)
        found = _squares(inside, moved_inside) + put_back.square() * back_inside.square().sum(1, keepdim=True)
        found += 2 * put_back * (inside @ back_inside + _diagonal(moved_inside @ back_inside))
        whole = self.squares[:, None] + 2 * self.rows @ shifts.mT + shifts.square().sum(-1)
        rest = (_squares(along, moved_along) - put_back.square()).sum(0)
        return (found.sum(0) / added(whole, rest)).mT.contiguous()


def _squares(rows: Tensor, moves: Tensor) -> Tensor:
    """Return the square norms of rows [h, V, n] plus moves [h, P, n], [h, V, P]."""
    return rows.square().sum(-1, keepdim=True) + 2 * rows @ moves.mT + moves.square().sum(-1)[:, None]


def _diagonal(products: Tensor) -> Tensor:
    return products.diagonal(dim1=1, dim2=2)[:, None]


_kept: WeakKeyDictionary[TextModel, tuple[tuple[object, ...], WordRows]] = WeakKeyDictionary()
"""The last rows of every word of a model, and what they were made of: other updates to it need them, too."""


@torch.no_grad()
def word_rows(model: TextModel, signal: Signal) -> WordRows:
    """Return the row of every word at one place of one sentence of frequent words.

    They cost a pass over the vocabulary, and are kept until another matrix is read or the model's weights have changed.
    """
    weights = tuple(float(parameter.sum()) for parameter in model.parameters().values())
    heads = None if signal.heads is None else tuple(signal.heads.tolist())
    reads = "qkv" if signal.roles[0] in "qkv" else signal.roles  # which read the same
    made_of = (signal.layer, reads, signal.differences, heads, weights)
    if model not in _kept or _kept[model][0] != made_of:
        around = _sentence(model, _AROUND + _framing(model), stream(0, "words around"))
        every = torch.arange(model.vocabulary_size, device=model.device)
        at = torch.tensor([_AT], device=model.device)
        rows = rows_among(model, replace(signal, scale=None), around, at, every[None])[0].contiguous()
        _kept[model] = made_of, WordRows(rows, rows.square().sum(-1))
    kept = _kept[model][1]
    if signal.scale is None:
        return kept
    scaled = kept.rows * signal.scale.to(kept.rows)
    return WordRows(scaled, scaled.square().sum(-1))


@dataclass(frozen=True)
class UsualRows:
    """What rows are like in sentences of some length, among words that anybody uses.

    Args:
        places: [n, d] what each place adds to a word's row.
        framing: [m, d] rows of the tokens that frame every sentence.
    """

    places: Tensor
    framing: Tensor

    def beside(self, signal: Signal) -> UsualRows:
        """Return what is left of them beside sentences that were taken out."""
        return UsualRows(signal.beside(self.places), signal.beside(self.framing))


@torch.no_grad()
def usual_rows(model: TextModel, signal: Signal, words: WordRows, length: int, rng: torch.Generator) -> UsualRows:
    """Return what rows are like in sentences of some length, averaged over sentences of random frequent words.

    Args:
        words: their rows at one place of one sentence.
        length: tokens of a sentence, special ones included.
    """
    probes = _drawn(model, _PROBES, rng)
    places = torch.arange(length, device=model.device)
    shift, framing = torch.zeros(length, words.rows.shape[1], device=model.device), []
    at = framing_rows(model, signal, length)
    for _ in range(_CONTEXTS):
        around = _sentence(model, length, rng)
        tried = rows_among(model, signal, around, places, probes.expand(length, -1))
        shift += (tried - words.rows[probes]).mean(1) / _CONTEXTS
        framing.append(rows_of(model, signal, around[None])[0, at])
    return UsualRows(shift, torch.stack(framing).mean(0))


def framing_rows(model: TextModel, signal: Signal, length: int) -> list[int]:
    """Return which rows are those of the tokens that frame every sentence of some length."""
    first = int(signal.differences)
    return [place - first for place in framing_places(model, length) if place >= first]


def framing_places(model: TextModel, length: int) -> list[int]:
    """Return the places of the tokens that frame every sentence of some length."""
    before, behind = len(model.special.prefix), len(model.special.suffix)
    return [*range(before), *range(length - behind, length)]


def framed(model: TextModel, words: Sequence[int]) -> Tensor:
    """Return a sentence's token ids, [n]."""
    return torch.tensor([*model.special.prefix, *words, *model.special.suffix], device=model.device)


def _framing(model: TextModel) -> int:
    return len(model.special.prefix) + len(model.special.suffix)


def _sentence(model: TextModel, length: int, rng: torch.Generator) -> Tensor:
    return framed(model, _drawn(model, length - _framing(model), rng).tolist())


def _drawn(model: TextModel, count: int, rng: torch.Generator) -> Tensor:
    usual = torch.tensor(frequent_tokens(model))
    return usual[torch.randint(len(usual), (count,), generator=rng)].to(model.device)
