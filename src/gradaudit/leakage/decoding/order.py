"""The order of one sentence's words, read off a noisy or compressed gradient: placed, then judged by likelihood.

One sentence has one row a position, and the row of a word at another position than its own lies outside their span.
So the share of a row in what stands above the noise places words, and needs no search: an assignment. Dropout takes a
tenth of right and of wrong rows alike. What is left wrong is mended by the gradients of the first blocks: the sentence
whose own gradient is most like the one that was sent, tensor by tensor, and whose words lie where they fit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradaudit.leakage.rowspace.deflation import Matrices, sentence_gradients
from gradaudit.leakage.rowspace.ranking import leveled
from gradaudit.models.base import TextModel
from gradaudit.progress import step

_SHORTER, _LONGER = 1, 3
"""Lengths tried beside one position a word: a wrong word more, or words that occur twice; and beside the length that
the last token's own place tells, right to one at noise of .01, exactly at .001."""
_ROOM = 24
"""Positions looked at beside one a word."""
_FAINT = 0.1
"""A direction counts by half where it stands this share of the noise's square above it (MiniLM, dropout on, words at
their own place: 99% at noise of .001, 70% at .01; benchmarks/noisy_places.py)."""
_PLACED = 40.0
"""What the mean share of a row that a place costs counts against the logarithm of the likeness. Dropout makes a longer
sentence likelier than the right one (.46 for .36, noise of .001), whose words all lie at their best places."""
_OTHERS = 12
"""Words of the whole vocabulary tried where no word that stands out has its place."""
AT_ONCE = 16
"""Sentences whose gradients are made in one pass: 3 times as many a second as one by one."""


@dataclass(frozen=True)
class Ordered:
    """A sentence and how like its gradient is to the one that was sent.

    Args:
        tokens: its ids.
        inner: those between the special tokens.
        label: its class; None where next words are predicted.
        likeness: mean cosine over tensors.
        score: the logarithm of the likeness, and what speaks for the places of its words.
    """

    tokens: tuple[int, ...]
    inner: tuple[int, ...]
    label: int | None
    likeness: float
    score: float


def classes_of(model: TextModel) -> Sequence[int | None]:
    """Return the labels that a sentence may have: the model's classes; next words need none."""
    return range(model.spec.labels) if model.spec.task == "classification" else (None,)


@torch.no_grad()
def likely_places(model: TextModel, stacked: Tensor, words: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Return [words, positions], how much of each word's input at each position lies in what stands above the noise.

    Args:
        model: a model with absolute positions.
        stacked: [out, d] block 0's gradients that share an input.
        words: token ids.
        positions: those looked at.
    """
    return _shares(model, _above_noise(stacked), words, positions)


def _above_noise(stacked: Tensor) -> tuple[Tensor, Tensor]:
    """Return a gradient's directions [r, d], weighed by how far they stand above the noise, and its columns' scale."""
    stacked, scale = leveled(stacked)
    _, values, directions = torch.linalg.svd(stacked.double(), full_matrices=False)
    noise = values.median().square().clamp_min(1e-30 * values[0].square())
    weight = (values.square() - noise).clamp_min(0)
    weight = (weight / (weight + _FAINT * noise)).sqrt()
    return (weight[:, None] * directions)[weight > 0], scale


def _shares(
    model: TextModel, above: tuple[Tensor, Tensor], words: Sequence[int] | None, positions: Sequence[int]
) -> Tensor:
    """Return what `likely_places` does, with what `_above_noise` returns; without words of the whole vocabulary."""
    directions, scale = above
    ids = None if words is None else torch.tensor(list(words), device=directions.device)
    shares = []
    for at in positions:
        rows = model.first_inputs(at, ids)
        rows = torch.nn.functional.normalize(rows * scale.to(rows), dim=1)
        shares.append((rows @ directions.T.to(rows)).square().sum(1))
    return torch.stack(shares, 1)


class Places:
    """What a gradient says of where each word of one sentence stood.

    Args:
        model: a model with absolute positions.
        stacked: [out, d] block 0's gradients that share an input.
        words: token ids that stand out.
        longest: inner positions looked at.
    """

    @torch.no_grad()
    def __init__(self, model: TextModel, stacked: Tensor, words: Sequence[int], longest: int) -> None:
        self._model, self._above = model, _above_noise(stacked)
        self._before, self._never = len(model.special.prefix), sorted(model.special.ids)
        self._fits: dict[int, NDArray[np.float32]] = {}
        self._nearest: dict[int, list[int]] = {}
        self.named, self.longest = set(words), longest
        self.ending = model.special.suffix[0] if model.special.suffix else None
        self.of_words = self._know(list(words))[:, :longest]
        if self.ending is not None:
            self._know([self.ending])

    @torch.no_grad()
    def _know(self, tokens: Sequence[int]) -> Tensor:
        """Return [tokens, positions] of `likely_places`, and keep how far each lies below its best place."""
        # one more where the last token may stand
        positions = range(self._before, self._before + self.longest + (self.ending is not None))
        like = _shares(self._model, self._above, tokens, positions)
        fits = (like - like.max(1, keepdim=True).values).cpu().numpy()
        self._fits |= dict(zip(tokens, fits, strict=True))
        return like

    def fits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return [tokens, positions], what share of its row a word loses at each position: 0 at its best, or below."""
        if new := [token for token in dict.fromkeys(tokens) if token not in self._fits]:
            self._know(new)
        return np.stack([self._fits[token] for token in tokens])

    @torch.no_grad()
    def nearest(self, place: int) -> list[int]:
        """Return the words of the vocabulary of which most lies above the noise at a place."""
        if place not in self._nearest:
            like = _shares(self._model, self._above, None, [self._before + place])[:, 0]
            like[self._never] = -1
            self._nearest[place] = like.topk(_OTHERS).indices.tolist()
        return self._nearest[place]

    def length(self) -> int | None:
        """Return the inner position that the sentence's last token fits best; None without such a token."""
        return None if self.ending is None else int(self._fits[self.ending].argmax())

    def fit(self, inner: Sequence[int]) -> float:
        """Return what share of their rows words lose where they stand, on average: 0 for none, or below."""
        if len(inner) > self.longest:
            return -math.inf
        total = float(self.fits(inner)[range(len(inner)), range(len(inner))].sum()) if inner else 0.0
        if self.ending is not None:
            total += float(self._fits[self.ending][len(inner)])
        return total / (len(inner) + 1)

    def others(self, inner: Sequence[int]) -> Iterator[list[int]]:
        """Yield the sentence with another word of the vocabulary where none that stands out is at its best place."""
        for place, word in enumerate(inner[: self.longest]):
            if word in self.named and self._fits[word][place] == 0 and inner.count(word) == 1:
                continue
            yield from ([*inner[:place], other, *inner[place + 1 :]] for other in self.nearest(place) if other != word)


def arrange(like: Tensor, words: Sequence[int]) -> list[int]:
    """Return a word for each position: every word once by the best assignment, then again where it fits as at its best.

    Args:
        like: [words, inner] from `likely_places`.
        words: their ids.
    """
    # a strong word fits everywhere better than a weak one at home
    chosen = [words[int(i)] for i in (like - like.max(1, keepdim=True).values).argmax(0)]
    for word, place in zip(*linear_sum_assignment(-like.cpu().numpy()), strict=True):
        chosen[place] = words[word]
    return chosen


def likenesses(model: TextModel, sentences: Sequence[Sequence[int]], label: int | None, sent: Matrices) -> list[float]:
    """Return the mean cosine, over tensors, between each sentence's own gradient and the one that was sent."""
    own = sentence_gradients(model, sentences, label, sent)
    cosines = [
        torch.nn.functional.cosine_similarity(own[k].flatten(1), g.to(own[k]).flatten()[None]) for k, g in sent.items()
    ]
    found: list[float] = torch.stack(cosines).mean(0).tolist()
    return found


def judged(
    model: TextModel,
    inners: Sequence[Sequence[int]],
    label: int | None,
    sent: Matrices,
    places: Places | None = None,
) -> list[Ordered]:
    """Return sentences, framed by the special tokens, with the likeness of their gradients to the one sent."""
    framed = [(*model.special.prefix, *inner, *model.special.suffix) for inner in inners]
    found = []
    for tokens, inner, like in zip(framed, inners, likenesses(model, framed, label, sent), strict=True):
        score = math.log(max(like, 1e-9)) + (_PLACED * places.fit(inner) if places else 0.0)
        found.append(Ordered(tokens, tuple(inner), label, like, score))
    return found


def order_words(
    model: TextModel,
    stacked: Tensor,
    sent: Matrices,
    words: Sequence[int],
    evaluations: int,
    rng: torch.Generator,
    length: int | None = None,
    beside: Sequence[Sequence[int]] = (),
) -> Ordered:
    """Return the words as the one sentence whose gradient is most like the one sent.

    Args:
        model: one with absolute positions.
        stacked: [out, d] block 0's gradients that share an input.
        sent: the gradients compared, by (block, role).
        words: token ids in the order of their evidence.
        evaluations: gradients computed at most, beside those to start from.
        rng: draws the order in which changes are tried that fit alike.
        length: tokens of the sentence, special ones included, where the attacker was given it.
        beside: sentences to start from beside those that the words make.
    """
    ends = len(model.special.prefix) + len(model.special.suffix)
    room = model.max_length - ends
    if length is not None:
        room = min(max(1, length - ends), room)
    longest = min(len(words) + _ROOM, room) if length is None else room
    places = Places(model, stacked, words, longest)
    lengths = {room} if length is not None else {min(len(words), longest)}
    if length is None:
        lengths |= set(range(len(words) - _SHORTER, len(words) + _LONGER + 1))
    if length is None and (told := places.length()) is not None:
        lengths |= {told - 1, told, told + 1}
    starts = [
        arrange(places.of_words[:inner, :inner], words[:inner]) for inner in sorted(lengths) if 1 <= inner <= longest
    ]
    before = len(model.special.prefix)
    starts += [list(one[before : len(one) - ends + before]) for one in beside if ends < len(one) <= ends + longest]
    every = [one for label in classes_of(model) for one in judged(model, starts, label, sent, places)]
    start = max(every, key=lambda one: one.score)
    return mended(model, start, words, sent, evaluations, rng, None if length is None else room, places)


def mended(
    model: TextModel,
    start: Ordered,
    words: Sequence[int],
    sent: Matrices,
    evaluations: int,
    rng: torch.Generator,
    inner: int | None = None,
    places: Places | None = None,
) -> Ordered:
    """Return the sentence that single changes lead to while they make its gradient more like the one sent.

    Args:
        model: the model.
        start: where to start.
        words: token ids that may be put in.
        sent: the gradients compared.
        evaluations: gradients computed at most.
        rng: draws the order in which changes are tried.
        inner: tokens between the special ones, where these are known: then changes keep their number.
        places: of the words: changes that fit better come first, and count more.
    """
    room = inner or model.max_length - len(model.special.prefix) - len(model.special.suffix)
    now, left = start, evaluations

    def changes() -> Iterator[list[int]]:
        every = changes_of(now.inner, words, inner or 1, room, rng)
        if places is None:
            return every
        several = [tuple(one) for one in chain(every, places.others(now.inner))]
        return map(list, sorted(dict.fromkeys(several), key=places.fit, reverse=True))

    options = changes()
    while left > 0 and (some := list(islice(options, min(AT_ONCE, left)))):
        left -= len(some)
        step("decode: order of the words", evaluations - left, evaluations)
        best = max(judged(model, some, now.label, sent, places), key=lambda one: one.score)
        if best.score > now.score:
            now = best
            options = changes()
    return now


def changes_of(
    now: Sequence[int], words: Sequence[int], least: int, room: int, rng: torch.Generator
) -> Iterator[list[int]]:
    """Yield, in random order, every exchange, move, removal, repetition and replacement of one of the words.

    Args:
        now: tokens between the special ones.
        words: token ids that may be put in.
        least, room: tokens between the special ones, at least and at most.
        rng: draws the order.
    """
    inner = list(now)
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
