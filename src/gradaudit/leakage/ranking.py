"""Words from a noisy or compressed gradient: taken one by one, each judged against the whole vocabulary's scores.

Noise, sign, top-k and quantization fill the row space, so no word lies in it and none lies outside. The batch's words
still stand out of the vocabulary, and so do their neighbors in meaning: a threshold on the plain ranking counts those
in. Simultaneous orthogonal matching pursuit (Tropp, Gilbert and Strauss, 2006) takes the word whose direction carries
most of the gradient, removes that direction from the gradient and from all other words, and goes on: neighbors fall
back with the word they resemble, and the score of the next best drops from 20 standard deviations of the vocabulary's
to the 4 or 5 of chance when the batch's words are used up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.models.base import TextModel

_POSITIONS = 24
"""Positions whose common part is removed, and over which a word's row is averaged: sentences are about that long."""
_SAMPLED, _APART = 16, 4
"""A position's common part is the mean of every 16th word; a word's row is averaged over every fourth position."""
_FLOOR = 0.1
"""A word of which less than this share is left resembles those already taken too much to be judged."""


@dataclass(frozen=True)
class RankedWord:
    """One word taken by the pursuit.

    Args:
        token: its id.
        score: standard deviations above the vocabulary's mean when it was taken.
    """

    token: int
    score: float


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


@torch.no_grad()
def rank_words(model: TextModel, stacked: Tensor, most: int, least: float) -> list[RankedWord]:
    """Return the words of a batch in the order of their evidence, until what is left looks like chance.

    Args:
        model: the model.
        stacked: [out, d] block 0's gradients that share an input, each scaled to unit norm.
        most: words taken at most.
        least: score below which the pursuit ends, in standard deviations of the vocabulary's.
    """
    positions = range(min(_POSITIONS, model.max_length) if model.absolute_positions else 1)
    sample = torch.arange(0, model.vocabulary_size, _SAMPLED, device=stacked.device)
    means = torch.stack([model.first_inputs(position, sample).mean(0) for position in positions])
    words = torch.zeros_like(model.first_inputs(0))
    used = positions[::_APART]
    for position in used:
        row = model.first_inputs(position)
        words += (row - row.mean(0)) / len(used)
    size = words.square().sum(1)
    # what all words of a position share is no evidence for any of them
    common = torch.linalg.qr(means.T).Q
    words = words - (words @ common) @ common.T
    directions = shrunk(stacked).to(words)
    directions = directions - (directions @ common) @ common.T
    excluded = torch.zeros(len(words), dtype=torch.bool, device=words.device)
    excluded[sorted(model.special.ids)] = True
    found: list[RankedWord] = []
    along, length = words @ directions.T, words.square().sum(1)
    units = words.new_zeros((0, words.shape[1]))
    for _ in range(most):
        # what was taken is orthogonal to the directions left, so only lengths have to follow
        score = along.square().sum(1) / length.maximum(_FLOOR * size).clamp_min(1e-30)
        score[excluded] = 0
        standard = (score - score.mean()) / score.std().clamp_min(1e-30)
        best = int(standard.argmax())
        if float(standard[best]) < least:
            break
        found.append(RankedWord(best, float(standard[best])))
        excluded[best] = True
        unit = words[best] - (words[best] @ units.T) @ units
        unit = unit / unit.norm()
        units = torch.cat([units, unit[None]])
        part = words @ unit
        length = length - part.square()
        along = along - part[:, None] * (directions @ unit)
        directions = directions - (directions @ unit)[:, None] * unit
    return found
