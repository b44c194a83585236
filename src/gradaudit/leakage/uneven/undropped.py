"""Sentences of an encoder that no dropout touched, from entries known unevenly.

In the first block a word has one row at each position, the same in every sentence, so that rows tell neither copies nor
sentences apart. In the second block a row depends on the whole sentence. Its low rank, fitted as the first one's, holds
the rows of all sentences of the batch and of no other, within the errors of its directions: sentences are put together
from the first block's words and mended until they lie in it. Nothing of the client's is random then. So the sentences
that were found make a gradient, with no other unknown than the weight of each one's labels, and every entry has an
error to hold it against.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from gradaudit.leakage.decoding.assembly import place, propose
from gradaudit.leakage.decoding.mending import descend, misfit
from gradaudit.leakage.decoding.pairs import Pairs
from gradaudit.leakage.decoding.rows import MaskedInputs, Search
from gradaudit.leakage.decoding.whole_rows import whole_rows
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.leakage.uneven.entries import Entries, entries
from gradaudit.leakage.uneven.held import HeldBatch, ReadBlock, Text, held_sentences
from gradaudit.leakage.uneven.low_rank import NEAR, started
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import Observation, Reconstruction

BLOCK = 1
"""The block whose rows tell sentences apart."""
_WORTH, _WORST, _CLEARER = 10.0, 8, 0.97
"""Sentences so near, in units of what fits, are mended by all words, at so many places at once, while what is left
falls to this share (MiniLM, 1e-5, 106 tokens: one wrong word of 28 leaves 0.74, the right one 0.3)."""
_MOST_HELD = 3
"""Sentences held in turn at most, times those there are: where nothing ever explains all, as under autocast."""


def undropped(
    seen: Observation, first: Entries, how: Search, starts: int, rng: torch.Generator, certain: bool = False
) -> Reconstruction | None:
    """Return the sentences of a batch; None where none was found: masked rows, no low rank, the second block not sent.

    Args:
        seen: the observation, of an encoder that classifies.
        first: entries of its block 0.
        how: how far to look.
        starts: proposals mended a turn, best fitting first.
        rng: draws the noise that errors are measured with.
        certain: None too where they do not explain everything: so much noise puts wrong sentences within reach.
    """
    model = seen.model
    second = entries(seen, BLOCK) if model.depth > BLOCK and model.absolute_positions else None
    if second is None:
        return None
    how, start = replace(how, rate=0.0), started(how.size)
    one = ReadBlock(model, first, 0, start, rng)
    if one.span is None:
        return None
    pairs = _pairs(model, MaskedInputs(model, one.span, NEAR, first.rounded, first.weights), how)
    if not bool((pairs.positions == 0).any()):
        return None
    two = ReadBlock(model, second, BLOCK, start, rng)
    if two.span is None:
        return None
    batch = HeldBatch(model, (one, two))
    with first.as_computed(model.device):
        nearest = _found(model, batch, two.span, pairs, how.size, starts)
        if not batch.sentences or (certain and not batch.explained()):
            return None
        details: dict[str, Any] = {"rank": one.span.rank, "rank_of_block_1": two.span.rank}
        return held_sentences(batch, how.size, nearest, details)


def _pairs(model: TextModel, inputs: MaskedInputs, how: Search) -> Pairs:
    """Return the words that lie in the first block's span, at each position."""
    first = model.special.prefix[:1]
    rows = [row for row in whole_rows(inputs, how, []) if not first or (row.position == 0) == (row.token == first[0])]
    width = len(inputs.basis)
    clean = torch.stack([row.clean for row in rows]) if rows else inputs.basis.new_zeros((0, width))
    positions, tokens = (
        torch.tensor([getattr(row, name) for row in rows], dtype=torch.long, device=clean.device)
        for name in ("position", "token")
    )
    return Pairs(positions, tokens, clean)


def _found(
    model: TextModel, batch: HeldBatch, span: Span, pairs: Pairs, size: int | None, starts: int
) -> list[tuple[float, Text]]:
    """Hold the sentences that lie in the second block's span, and return the others that were near, with how far."""
    nearest: list[tuple[float, Text]] = []
    first = batch.rest().span(0)
    tried: set[Text] = set()
    while not batch.explained() and len(tried) < _MOST_HELD * (size or span.rank):
        step("decode: sentences", len(batch.sentences), size)
        before = len(tried)
        placed = place(model, batch.rest(), first, pairs)
        proposals = propose(model, placed)
        if not proposals:
            break
        _, values = misfit(model, span, proposals)
        nearest = []
        for at in values.argsort().tolist()[:starts]:
            if any(_alike(proposals[at], one) for one in batch.sentences):
                continue
            sentence, rows = descend(model, span, placed.near, proposals[at])
            if float(rows.square().mean()) < _WORTH:
                sentence, rows = _mended(model, span, pairs, sentence, rows)
            if (far := float(rows.square().mean())) >= 1:
                nearest.append((far, sentence))
            elif sentence not in tried:
                tried.add(sentence)
                batch.add(sentence)
                if batch.explained():
                    break
        # what all of them explain, a wrong one does not
        batch.drop(size)
        if len(tried) == before:
            break
    return nearest


def _mended(model: TextModel, span: Span, pairs: Pairs, sentence: Text, rows: Tensor) -> tuple[Text, Tensor]:
    """Exchange words whose rows lie farthest off for others of the first block's span, or two, while that helps.

    In a long sentence one wrong word moves the mean little, and words of weak signals are not among those proposed.
    """
    while True:
        worst = [p for p in rows.argsort(descending=True).tolist() if 0 < p < len(sentence) - 1][:_WORST]
        options: list[tuple[tuple[int, int], ...]] = [
            ((p, t),) for p in worst for t in pairs.tokens[pairs.positions == p].tolist()
        ]
        options += [((p, sentence[q]), (q, sentence[p])) for p, q in combinations(worst, 2)]
        allowed = [one for one in options if not {t for _, t in one} & model.special.ids]
        tried = [_with(sentence, one) for one in allowed if any(sentence[p] != t for p, t in one)]
        if not tried:
            return sentence, rows
        every, values = misfit(model, span, tried)
        best = int(values.argmin())
        if float(values[best]) > _CLEARER * float(rows.square().mean()):
            return sentence, rows
        sentence, rows = tried[best], every[best, : len(sentence)]


def _with(sentence: Text, words: Iterable[tuple[int, int]]) -> Text:
    """Return a sentence with other tokens at some places."""
    other = dict(words)
    return tuple(other.get(place, token) for place, token in enumerate(sentence))


def _alike(one: Text, other: Text) -> bool:
    """Say whether most words of one sentence stand in the other where they stand."""
    return 2 * sum(a == b for a, b in zip(one, other, strict=False)) > len(one)
