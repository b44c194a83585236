"""The order of one sentence's words, read off a noisy or compressed gradient: placed, then judged by likelihood.

dW = sum_t M_t w_t^T + sum_p N_p p^T + ... (`pairs`): with the words known, least squares over 3 d numbers a word
averages the noise out, and in one sentence each position received exactly what its one word brought, N_p = M_t.
Matching the two by an assignment places words and needs no search. What is left wrong is mended by the gradients of the
first blocks: the sentence whose own gradient is most like the one that was sent, tensor by tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradaudit.leakage.rowspace.deflation import Matrices, sentence_gradient
from gradaudit.models.base import TextModel
from gradaudit.progress import step

_SHORTER, _LONGER = 1, 3
"""Lengths tried beside one position a word: a wrong word more, or words that occur twice."""
_STARTS = 2
"""Arrangements that are mended, of all lengths and labels the most like."""


@dataclass(frozen=True)
class Ordered:
    """A sentence and how like its gradient is to the one that was sent.

    Args:
        tokens: its ids.
        inner: those between the special tokens.
        label: its class; None where next words are predicted.
        likeness: mean cosine over tensors.
    """

    tokens: tuple[int, ...]
    inner: tuple[int, ...]
    label: int | None
    likeness: float


def classes_of(model: TextModel) -> Sequence[int | None]:
    """Return the labels that a sentence may have: the model's classes; next words need none."""
    return range(model.spec.labels) if model.spec.task == "classification" else (None,)


@torch.no_grad()
def likely_places(model: TextModel, stacked: Tensor, words: Sequence[int], inner: int) -> Tensor:
    """Return [words, inner] how much each inner position received is like what each word brought, as a cosine.

    Args:
        model: a model with absolute positions.
        stacked: [out, d] block 0's gradients that share an input, dropout off.
        words: token ids of one sentence, special ones left out.
        inner: positions between the special tokens.
    """
    parts, special = model.first_input_parts(), model.special
    ids = [*special.prefix, *words, *special.suffix]
    before = len(special.prefix)
    every = before + inner + len(special.suffix)
    each = torch.cat([parts.words[ids], parts.positions[:every]]).double()
    each = (each - each.mean(1, keepdim=True)) * parts.weight.double()
    directions = torch.cat([each, parts.bias.double()[None]])
    received = torch.linalg.pinv(directions, rtol=1e-6).T @ stacked.T
    brought = received[before : before + len(words)]
    taken = received[len(ids) + before : len(ids) + before + inner]
    normalize = torch.nn.functional.normalize
    like: Tensor = normalize(brought, dim=1) @ normalize(taken, dim=1).T
    return like


def arrange(like: Tensor, words: Sequence[int]) -> list[int]:
    """Return a word for each position: every word once by the best assignment, then the likeliest where one is left.

    Args:
        like: [words, inner] from `likely_places`.
        words: their ids.
    """
    chosen = [words[int(i)] for i in like.argmax(0)]
    for word, place in zip(*linear_sum_assignment(-like.cpu().numpy()), strict=True):
        chosen[place] = words[word]
    return chosen


def likeness(model: TextModel, sentence: tuple[int, ...], label: int | None, sent: Matrices) -> float:
    """Return the mean cosine, over tensors, between a sentence's own gradient and the one that was sent."""
    own = sentence_gradient(model, sentence, label, sent)
    cosines = [torch.nn.functional.cosine_similarity(own[k].flatten(), g.flatten(), dim=0) for k, g in sent.items()]
    return float(torch.stack(cosines).mean())


def order_words(
    model: TextModel,
    stacked: Tensor,
    sent: Matrices,
    words: Sequence[int],
    evaluations: int,
    rng: torch.Generator,
    length: int | None = None,
) -> Ordered:
    """Return the words as the one sentence whose gradient is most like the one sent.

    Args:
        model: one with absolute positions.
        stacked: [out, d] block 0's gradients that share an input.
        sent: the gradients compared, by (block, role).
        words: token ids in the order of their evidence.
        evaluations: gradients computed at most, shared by the starts.
        rng: draws the order in which changes are tried.
        length: tokens of the sentence, special ones included, where the attacker was given it.
    """
    ends = len(model.special.prefix) + len(model.special.suffix)
    room = model.max_length - ends
    shortest = min(max(1, len(words) - _SHORTER), room)
    lengths = range(shortest, min(len(words) + _LONGER, room) + 1)
    if length is not None:
        room = min(max(1, length - ends), room)
        lengths = range(room, room + 1)
    starts: list[Ordered] = []
    for inner in lengths:
        used = list(words[:inner])
        placed = arrange(likely_places(model, stacked, used, inner), used)
        starts += [judged(model, placed, label, sent) for label in classes_of(model)]
    starts.sort(key=lambda s: -s.likeness)
    best, left = starts[0], evaluations - len(starts)
    for start in starts[:_STARTS]:
        now, left = mended(model, start, words, sent, left, rng, None if length is None else room)
        best = now if now.likeness > best.likeness else best
    return best


def mended(
    model: TextModel,
    start: Ordered,
    words: Sequence[int],
    sent: Matrices,
    evaluations: int,
    rng: torch.Generator,
    inner: int | None = None,
) -> tuple[Ordered, int]:
    """Return the sentence that single changes lead to while they make its gradient more like the one sent.

    Args:
        model: the model.
        start: where to start.
        words: token ids that may be put in.
        sent: the gradients compared.
        evaluations: gradients computed at most.
        rng: draws the order in which changes are tried.
        inner: tokens between the special ones, where these are known: then changes keep their number.

    Returns:
        The sentence, and how many evaluations are left.
    """
    room = inner or model.max_length - len(model.special.prefix) - len(model.special.suffix)
    now, left = start, evaluations
    least = inner or 1
    changes = changes_of(now, words, least, room, rng)
    while left > 0:
        other = next(changes, None)
        if other is None:
            break  # no change helps any more
        left -= 1
        step("decode: order of the words", evaluations - left, evaluations)
        found = judged(model, other, now.label, sent)
        if found.likeness > now.likeness:
            now, changes = found, changes_of(found, words, least, room, rng)
    return now, left


def judged(model: TextModel, inner: Sequence[int], label: int | None, sent: Matrices) -> Ordered:
    """Return a sentence, framed by the special tokens, with the likeness of its gradient to the one sent."""
    sentence = (*model.special.prefix, *inner, *model.special.suffix)
    return Ordered(sentence, tuple(inner), label, likeness(model, sentence, label, sent))


def changes_of(now: Ordered, words: Sequence[int], least: int, room: int, rng: torch.Generator) -> Iterator[list[int]]:
    """Yield, in random order, every exchange, move, removal, repetition and replacement of one of the words.

    Args:
        now: the sentence that is changed.
        words: token ids that may be put in.
        least, room: tokens between the special ones, at least and at most.
        rng: draws the order.
    """
    inner = list(now.inner)
    places = range(len(inner))
    changes: list[tuple[str, int, int]] = [("exchange", a, b) for a, b in combinations(places, 2)]
    changes += [("move", a, b) for a in places for b in places if abs(a - b) > 1]
    changes += [("remove", a, 0) for a in places if len(inner) > least]
    changes += [("put", word, b) for word in words for b in range(len(inner) + 1) if len(inner) < room]
    changes += [("replace", word, b) for word in words for b in places if word != inner[b]]
    for at in torch.randperm(len(changes), generator=rng).tolist():
        kind, a, b = changes[at]
        other = list(inner)
        if kind == "exchange":
            other[a], other[b] = other[b], other[a]
        elif kind == "move":
            other.insert(b, other.pop(a))
        elif kind == "remove":
            del other[a]
        elif kind == "put":
            other.insert(b, a)
        else:
            other[b] = a
        yield other
