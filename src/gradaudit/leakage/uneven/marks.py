"""Sentences from the marks that words leave in trained embeddings over several steps of Adam.

A word that occurs once moves its row by the gradient of its place, and the row of its position by the same gradient,
added to those of the other sentences and steps. Adam leaves their signs. Of B K gradients in a position's row one is
found with a correlation of (2 / pi) / sqrt(B K): for MiniLM after four steps of eight sentences 0.11, with a deviation
of 0.07. And the words of a sentence have in common what comes back from its class and its first token: their marks
correlate by 0.056, those of other sentences of a step by 0.0 (deviation 0.065). Each is weak; together they place
words. Annealing looks for the likeliest arrangement, one word a place. Then the model itself judges: of the sentences
so arranged it computes what would come back to each place (dropout off, weights as at first, the label that fits
better), and words go where that is like their mark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradaudit.leakage.uneven.words import beyond_decay
from gradaudit.progress import step as told
from gradaudit.types import NamedWord, Observation

_SPREAD = 1.35
"""Deviation of a correlation of marks, in that of white ones, 1 / sqrt(d) (MiniLM: 0.065 to 0.08, white 0.051)."""
_TOGETHER = 0.055
"""Correlation of two words' marks in one sentence, over that in two (MiniLM, CoLA: 0.05 to 0.06)."""
_SIMULATED, _SIMULATED_SPREAD = 0.2, 0.06
"""Correlation of a word's mark with what the model sends back there, and its deviation (MiniLM, one to four steps: 0.25
to 0.4 in the right sentence, half of that with its words in another order)."""
_TURNS, _TRUST = 24, 3.0
"""How often sentences are simulated and arranged anew, and what the last one counts: until most of a sentence is right,
what it sends back is mostly wrong."""
_HOT, _WARM, _COLD = 6.0, 3.0, 0.3
"""Temperatures of the annealing, in log likelihood: from the first, or the second where it goes on, to the last."""
_MOVES, _MENDING, _BEGUN = 2000, 300, 3
"""Moves tried a word, and where it goes on; and how often it is begun: the likeliest arrangement of all counts."""
_MOST = 30_000_000
"""Words times places at most, each a number that is held three times: bounds memory."""

Place = tuple[int, int]
"""Sentence and position."""


@dataclass(frozen=True)
class Marks:
    """What training left in the embeddings.

    Args:
        words: [V, d] by token.
        places: [P, d] by position of a text.
        steps: how many left it.
    """

    words: Tensor
    places: Tensor
    steps: int


def marks_of(seen: Observation) -> Marks | None:
    """Return the marks of a weight change; None where words or positions were not trained, or not by a known optimizer.

    Args:
        seen: the observation.
    """
    model, known = seen.model, seen.knowledge
    if known.training is None or known.steps is None:
        return None
    rates = known.training.rates(known.steps)
    words, places = (beyond_decay(seen, group, rates) for group in ("word", "position"))
    if words is None or places is None:
        return None
    at = model.family.position_ids(torch.arange(model.max_length, device=places.device))
    return Marks(words, places[at], known.steps)


def sentences_of(
    seen: Observation, marks: Marks, words: Sequence[NamedWord], step: int, size: int, rng: torch.Generator
) -> list[tuple[int, ...]]:
    """Return the words of one step's minibatch as sentences, in their likeliest order; none where that cannot be told.

    Args:
        seen: the observation.
        marks: of it.
        words: with the steps each was in.
        step: which one.
        size: sentences of its minibatch.
        rng: for the annealing.
    """
    model, special = seen.model, seen.model.special
    before, ends = len(special.prefix), len(special.prefix) + len(special.suffix)
    ids = [w.token for w in words if w.steps is not None and step in w.steps and w.token not in special.ids]
    moved = torch.where((marks.places != 0).any(1))[0]
    if not ids or len(moved) == 0:
        return []
    size = min(size, len(ids))  # what a bundle says of itself may be anything
    width = min(max(int(moved.max()) + 1 - ends, -(-len(ids) // size)), model.max_length - ends)
    if width < 1 or len(ids) > size * width or len(ids) * size * width > _MOST:
        return []
    own, held = (_unit(t) for t in (marks.words[ids], marks.places[before : before + width]))
    deviation = _SPREAD / math.sqrt(own.shape[1])
    here = 2 / math.pi / math.sqrt(size * marks.steps)
    by_place = _likelier(own @ held.T, here, deviation)[:, None].expand(-1, size, -1).cpu().numpy()
    together = _likelier(own @ own.T, _TOGETHER, deviation)
    together.fill_diagonal_(0)
    beside = together.cpu().numpy()
    found = []
    for chain in range(_BEGUN):
        told(f"decode: sentences of step {step + 1} of {marks.steps}", chain, _BEGUN)
        total, where = arranged(by_place, beside, rng)
        simulated = np.zeros_like(by_place)
        for turn in range(1, 1 + _TURNS if model.spec.task == "classification" else 0):
            texts = [[*special.prefix, *one, *special.suffix] for one in _read(where, ids, size)]
            simulated = simulated / 2 + _simulated(seen, texts, where, own, by_place.shape) / 2
            total, where = arranged(by_place + (_TRUST * turn / _TURNS) * simulated, beside, rng, where)
        found.append((total, where))
    best = max(found, key=lambda one: one[0])[1]
    return [(*special.prefix, *one, *special.suffix) for one in _read(best, ids, size) if one]


def _read(where: Sequence[Place], ids: Sequence[int], size: int) -> list[list[int]]:
    """Return the words of each sentence in order."""
    order = sorted(range(len(ids)), key=where.__getitem__)
    return [[ids[word] for word in order if where[word][0] == sentence] for sentence in range(size)]


def _simulated(
    seen: Observation, texts: Sequence[Sequence[int]], where: Sequence[Place], marks: Tensor, shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Return [n, s, p] log likelihood ratios of words at places where the model itself sends this back.

    Args:
        seen: the observation.
        texts: the sentences as they are arranged.
        where: place of each word.
        marks: [n, d] of the words.
        shape: n, s, p.
    """
    model = seen.model
    texts = [text or [0] for text in texts]  # where no special token frames them, a sentence may have none at all
    longest = max(map(len, texts))
    ids = torch.tensor([[*t, *[0] * (longest - len(t))] for t in texts], device=marks.device)
    mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in texts], device=marks.device)
    found = torch.zeros(shape, dtype=marks.dtype, device=marks.device)
    before = len(model.special.prefix)
    signs = []
    for label in range(model.spec.labels):
        vectors = model.word_vectors()[ids].clone().requires_grad_()
        loss = model.loss(embeddings=vectors, mask=mask, labels=torch.full((len(ids),), label, device=ids.device))
        signs.append(-_unit(torch.autograd.grad(loss, vectors)[0].sign().to(marks).flatten(0, 1)).view(*ids.shape, -1))
    for sentence in range(shape[1]):
        members = sorted((place[1], word) for word, place in enumerate(where) if place[0] == sentence)
        if not members:
            continue
        own = torch.tensor([word for _, word in members], device=marks.device)
        at = torch.arange(before, before + len(members), device=marks.device)
        here = max((s[sentence, at] for s in signs), key=lambda some: float((some * marks[own]).sum()))
        positions = torch.tensor([position for position, _ in members], device=marks.device)
        found[:, sentence, positions] = _likelier(marks @ here.T, _SIMULATED, _SIMULATED_SPREAD)
    return found.cpu().numpy()


def _unit(rows: Tensor) -> Tensor:
    """Return rows of length 1, 0 where they have none."""
    return torch.nn.functional.normalize(rows, dim=1)


def _likelier(seen: Tensor, mean: float, deviation: float) -> Tensor:
    """Return log likelihood ratios of correlations: of this mean over none."""
    return (mean * seen - mean**2 / 2) / deviation**2


def arranged(
    by_place: NDArray[np.float64],
    together: NDArray[np.float64],
    rng: torch.Generator,
    start: Sequence[Place] | None = None,
) -> tuple[float, list[Place]]:
    """Return the log likelihood of the arrangement that annealing ends in, and each word's place.

    Args:
        by_place: [n, s, p] log likelihood ratio of each word in each sentence at each position; n is at most s p.
        together: [n, n] of two words in one sentence; 0 on the diagonal.
        rng: for starts and moves.
        start: to go on from, with fewer moves; None for a random one.
    """
    count, size, width = by_place.shape
    drawn = torch.randperm(size * width, generator=rng)[:count].tolist()
    where: list[Place] = [divmod(one, width) for one in drawn] if start is None else list(start)
    held = np.full((size, width), -1)
    inside = np.zeros((size, count))
    for word, (sentence, position) in enumerate(where):
        held[sentence, position] = word
        inside[sentence, word] = 1
    drawn_to = together @ inside.T
    moves, hot = (_MOVES * count, _HOT) if start is None else (_MENDING * count, _WARM)
    picked = torch.randint(count, (moves,), generator=rng).tolist()
    targets = torch.randint(size * width, (moves,), generator=rng).tolist()
    chances = (-torch.rand(moves, generator=rng).clamp_min(1e-30).log()).tolist()
    for turn, (word, target, chance) in enumerate(zip(picked, targets, chances, strict=True)):
        (sentence, position), (other, there) = where[word], divmod(target, width)
        if (sentence, position) == (other, there):
            continue
        swapped = int(held[other, there])
        gain = by_place[word, other, there] - by_place[word, sentence, position]
        if other != sentence:
            gain += drawn_to[word, other] - drawn_to[word, sentence]
        if swapped >= 0:
            gain += by_place[swapped, sentence, position] - by_place[swapped, other, there]
            if other != sentence:
                gain += drawn_to[swapped, sentence] - drawn_to[swapped, other] - 2 * together[swapped, word]
        if gain < -chance * hot * (_COLD / hot) ** (turn / moves):
            continue
        held[sentence, position], held[other, there] = swapped, word
        where[word] = (other, there)
        if swapped >= 0:
            where[swapped] = (sentence, position)
        if other != sentence:
            change = together[:, word] - (together[:, swapped] if swapped >= 0 else 0)
            drawn_to[:, sentence] -= change
            drawn_to[:, other] += change
    total = sum(float(by_place[word, s, p]) for word, (s, p) in enumerate(where))
    return total + sum(float(drawn_to[word, s]) for word, (s, _) in enumerate(where)) / 2, where
