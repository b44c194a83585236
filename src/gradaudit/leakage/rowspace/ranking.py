"""Words from a noisy or compressed gradient: taken one by one, each judged against the whole vocabulary's scores.

Noise, sign, top-k and quantization fill the row space, so no word lies in it and none lies outside. The batch's words
still stand out of the vocabulary, and so do their neighbors in meaning: a threshold on the plain ranking counts those
in. Simultaneous orthogonal matching pursuit (Tropp, Gilbert and Strauss, 2006) takes the word whose direction carries
most of the gradient, removes that direction from the gradient and from all other words, and goes on: neighbors fall
back with the word they resemble.

Each word is judged by the vocabulary itself: how many words would score as high by chance. Where to stop is then a
question of multiple testing in a given order, answered by ForwardStop (G'Sell, Wager, Chouldechova and Tibshirani,
2016).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.noise_floor import balanced
from gradaudit.models.base import TextModel

_POSITIONS = 24
"""Positions whose common part is removed, and over which a word's row is averaged: sentences are about that long."""
_SAMPLED, _APART = 16, 4
"""A position's common part is the mean of every 16th word; a word's row is averaged over every fourth position."""
_FLOOR = 0.1
"""A word of which less than this share is left resembles those already taken too much to be judged."""
_SHARED = 1e-3
"""Directions shared by words of a position or brought by special tokens, down to this share of the strongest."""
_PRUNED, _ANY_SIZE = 0.02, 0.05
"""A larger share of zeros was left out (a gradient's own are whole rows or columns); and whatever its size, where the
smallest entry that is there has less than this share of the middle one: of the largest tenth it has 0.6."""
_ENOUGH = 16
"""Entries a line has on average for its own size to be told (MiniLM, 8 sentences; words found of 84 plain and
balanced: 66 and 80 with 38 entries a line, 60 and 68 with 19, 31 and 14 with 4)."""
_TAIL = 1000
"""Highest scores that tell how the vocabulary's fall off: more than a batch has words, few enough to be its tail."""


@dataclass(frozen=True)
class RankedWord:
    """One word taken by the pursuit.

    Args:
        token: its id.
        expected: words of the vocabulary that would have scored as high by chance when it was taken.
    """

    token: int
    expected: float


def expected_by_chance(scores: Tensor) -> float:
    """Return how many of the scores would be as high as the highest by chance.

    Scores fall off exponentially at their end (Pickands, 1975, for all tails of the chi-square kind); the median of
    the excesses over the thousandth gives the rate, and words of the batch among them move a median little.

    Args:
        scores: [V]; at least 20.
    """
    tail = min(_TAIL, len(scores) // 10)
    top = scores.topk(tail + 1).values.double()
    excess = top[1:] - top[-1]
    rate = math.log(2) / float(excess.median().clamp_min(1e-300))
    return tail * math.exp(-min(rate * float(top[0] - top[-1]), 700.0))


def accepted(expected: Sequence[float], level: float) -> int:
    """Return how many of the words, in their order, are taken when a share `level` of them may be wrong.

    ForwardStop: the largest k with mean of -log(1 - p) over the first k at most `level`. With p = 1 - exp(-E) for the
    highest of many scores, of which E are expected by chance, -log(1 - p) is E itself.

    Args:
        expected: E of each word.
        level: false-discovery rate, between 0 and 1.
    """
    total, taken = 0.0, 0
    for count, each in enumerate(expected, 1):
        total += each
        if total <= level * count:
            taken = count
    return taken


def shrunk(stacked: Tensor) -> Tensor:
    """Return a matrix's right singular directions, each scaled by the root of what it holds above the noise, [r, d].

    Args:
        stacked: [out, d]; its median singular value is taken for noise, of which 1.2 times is subtracted in square.
    """
    _, values, vh = torch.linalg.svd(stacked, full_matrices=False)
    above = (values.square() - (1.2 * values.median()).square()).clamp_min(0).sqrt().sqrt()
    kept = above > 0
    directions: Tensor = above[kept, None] * vh[kept] / above.max().clamp_min(1e-300)
    return directions


def _pruned(stacked: Tensor) -> bool:
    """Say whether entries were left out whatever their size, and enough are there to tell each line's."""
    there = stacked[stacked != 0].abs()
    few = _ENOUGH * len(stacked) < len(there) < (1 - _PRUNED) * stacked.numel()
    return few and bool(there.min() < _ANY_SIZE * there.median())


def leveled(stacked: Tensor) -> tuple[Tensor, Tensor]:
    """Return a gradient in which lines and columns count alike where they must, and what its columns were scaled by.

    Entries left out whatever their size are noise in proportion to what they were: lines and columns of outliers would
    drown the others.

    Args:
        stacked: [out, d].
    """
    if not _pruned(stacked):
        return stacked, torch.ones_like(stacked[0])
    stacked, scale = balanced(stacked)
    return stacked, scale / scale.median()


@torch.no_grad()
def rank_words(model: TextModel, stacked: Tensor, most: int, level: float) -> list[RankedWord]:
    """Return the words of a batch in the order of their evidence, until what is left looks like chance.

    Special tokens, which every sentence has, are not looked for.

    Args:
        model: the model.
        stacked: [out, d] block 0's gradients that share an input, each scaled to unit norm.
        most: words taken at most.
        level: share of the words returned that may be wrong (false-discovery rate).
    """
    stacked, scale = leveled(stacked)

    def rows(position: int, ids: Tensor | None = None) -> Tensor:
        row = model.first_inputs(position, ids)
        return row * scale.to(row)

    positions = range(min(_POSITIONS, model.max_length) if model.absolute_positions else 1)
    sample = torch.arange(0, model.vocabulary_size, _SAMPLED, device=stacked.device)
    means = torch.stack([rows(position, sample).mean(0) for position in positions])
    words = torch.zeros_like(model.first_inputs(0))
    used = positions[::_APART]
    for position in used:
        row = rows(position)
        words += (row - row.mean(0)) / len(used)
    size = words.square().sum(1)
    # what all words of a position share is no evidence for any of them; nor is what the special tokens of every
    # sentence bring at any position, or their neighbors (a full stop beside [SEP]) would stand out
    frame = torch.tensor(sorted({*model.special.prefix, *model.special.suffix}), dtype=torch.long).to(stacked.device)
    framed = [rows(position, frame) for position in positions]
    left, values, _ = torch.linalg.svd(torch.cat([means, *framed]).T, full_matrices=False)
    common = left[:, values > _SHARED * values[0]]
    words = words - (words @ common) @ common.T
    directions = shrunk(stacked).to(words)
    directions = directions - (directions @ common) @ common.T
    open_words = torch.ones(len(words), dtype=torch.bool, device=words.device)
    open_words[sorted(model.special.ids)] = False
    found: list[RankedWord] = []
    along, length = words @ directions.T, words.square().sum(1)
    units = words.new_zeros((0, words.shape[1]))
    total = 0.0
    while len(found) < most:
        # what was taken is orthogonal to the directions left, so only lengths have to follow
        score = along.square().sum(1) / length.maximum(_FLOOR * size).clamp_min(1e-30)
        expected = expected_by_chance(score[open_words])
        total += expected
        if total > level * most:
            break  # no number of words behind this one could make up for it
        best = int(torch.where(open_words, score, -1.0).argmax())
        found.append(RankedWord(best, expected))
        open_words[best] = False
        unit = words[best] - (words[best] @ units.T) @ units
        unit = unit / unit.norm()
        units = torch.cat([units, unit[None]])
        part = words @ unit
        length = length - part.square()
        along = along - part[:, None] * (directions @ unit)
        directions = directions - (directions @ unit)[:, None] * unit
    return found[: accepted([word.expected for word in found], level)]
