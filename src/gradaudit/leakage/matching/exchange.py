"""Words of a guess exchanged, moved, put in and left out, judged by the likeness itself, until nothing helps."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

import torch
from torch import Tensor

from gradaudit.leakage.matching.similarity import Likeness
from gradaudit.progress import answering, step

_TOGETHER = 1e-6
"""A likeness this near to 1 cannot grow."""
_KICKED = 2
"""Words left out or exchanged at random where no change helps, the least; else a third of all."""
_NEAR = 16
"""Words of a slot, by slope, that a random exchange takes from."""
_KEPT, _OF_A_LENGTH = 4, 2
"""Guesses that are gone on from, and of these at most so many of one length: a sentence often gets longer and
shorter again on its way to the right one."""
_TELLING = 1e-5
"""A likeness that is lower by more is another one: a hundred times the rounding of a cosine in float32."""
_AT_ONCE = 64
"""Guesses judged between two looks at the clock."""
_COMBINED = 12
"""Changes that are tried beside the best of a round."""

Sentence = tuple[int, ...]
_Key = tuple[tuple[Sentence, ...], Sentence | None]


@dataclass(frozen=True)
class Guess:
    """Sentences and labels, and how like their update is to the one that was seen.

    Args:
        sentences: token ids between those that frame each sentence.
        labels: classes; None where next words are predicted.
        likeness: -1 to 1.
    """

    sentences: tuple[Sentence, ...]
    labels: tuple[int, ...] | None = None
    likeness: float = -2.0

    def with_words(self, row: int, words: Sequence[int]) -> "Guess":
        """Return the guess with other words in one sentence, not judged yet."""
        return replace(self, sentences=(*self.sentences[:row], tuple(words), *self.sentences[row + 1 :]), likeness=-2.0)

    @property
    def slots(self) -> list[tuple[int, int]]:
        """Sentence and place of every word."""
        return [(row, at) for row, words in enumerate(self.sentences) for at in range(len(words))]


@dataclass(frozen=True)
class Exchanges:
    """How words are exchanged.

    Args:
        frames: what stands before and behind each sentence's words.
        words: [V] bool, words that may be put in.
        usual: frequent words, some of which are tried in every slot, whatever the slopes say.
        marks: of punctuation, tried in every slot.
        classes: labels that may be put in, 0 where they are known.
        shortest: words that a sentence has at least.
        longest: words that a sentence may come to have; None where its length is known and stays.
        proposals: exchanges that are judged a round; a slot that is looked through has as many.
        evaluations: gradients computed at most.
    """

    frames: tuple[tuple[Sentence, Sentence], ...]
    words: Tensor
    usual: tuple[int, ...]
    marks: tuple[int, ...]
    classes: int
    shortest: int
    longest: int | None
    proposals: int
    evaluations: int

    def whole(self, guess: Guess) -> tuple[Sentence, ...]:
        """Return a guess's sentences in their frames."""
        return tuple(
            (*before, *words, *behind) for (before, behind), words in zip(self.frames, guess.sentences, strict=True)
        )


def exchange_words(like: Likeness, start: Guess, how: Exchanges, rng: torch.Generator, what: str) -> Guess:
    """Return the likest guess found.

    The steepest changes of all slots are judged. Where none helps, every slot is looked through: by slope, by nearness
    to the word that stands there, and among frequent words, for slopes say little of words that are far. Of the likest
    guesses a few are kept, of different lengths; where none of them leads on, a third of the words of one is left out
    (where lengths are known: exchanged at random), and changes of that are judged.

    Args:
        like: the likeness.
        start: where to start.
        how: what may be exchanged, and how often.
        rng: draws frequent words, the order of moves and the random exchanges.
        what: name for the progress bar.

    Raises:
        StoppedError: Ctrl-C, with the likest guess until then.
    """
    climb = _Climb(like, how, rng, what)
    fixed = not (start.slots or how.classes or how.longest is not None)
    with answering(lambda _: climb.best if climb.begun else None):
        climb.judge([start])
        while like.spent < how.evaluations and climb.best.likeness < 1 - _TOGETHER and not fixed:
            climb.round()
    step(what, how.evaluations, how.evaluations)
    return climb.best


def singles_out(like: Likeness, guess: Guess, how: Exchanges, rng: torch.Generator) -> bool:
    """Say whether no guess with one word exchanged for the word nearest to it is about as like as this one.

    Little that was sent, as a head's bias alone, is the same for every text: then a likeness of 1 says nothing.
    """
    climb = _Climb(like, replace(how, evaluations=like.spent + len(guess.slots) + 1), rng, "exchange: nearest words")
    near = [
        _exchanged(guess, row, at, word) for row, at in guess.slots for word in climb.near(guess.sentences[row][at], 1)
    ]
    return all(guess.likeness - one.likeness > _TELLING for one in climb.judge(near))


class _Climb:
    """Guesses that are gone on from, and those that were."""

    def __init__(self, like: Likeness, how: Exchanges, rng: torch.Generator, what: str) -> None:
        self._like, self._how, self._rng, self._what = like, how, rng, what
        self._kept: list[Guess] = []
        self._known: dict[_Key, float] = {}
        self._left: set[_Key] = set()
        self._lengths = like.table.norm(dim=1)
        allowed = set(how.words.nonzero().flatten().tolist())
        self._marks = [word for word in how.marks if word in allowed]
        self._frequent = [word for word in how.usual if word in allowed]

    @property
    def begun(self) -> bool:
        """Whether anything was judged."""
        return bool(self._kept)

    @property
    def best(self) -> Guess:
        """The likest guess so far."""
        return self._kept[0]

    def round(self) -> None:
        """Judge changes of the likest guess that was not left yet, or of a kicked one."""
        now = next((one for one in self._kept if _key(one) not in self._left), None)
        if now is None:
            kicked = self.judge([self._kicked()])
            if not kicked:
                return  # no evaluations are left
            now = kicked[0]
        self._left.add(_key(now))
        if self._over():
            return
        slopes = self._slopes_of(now)
        found = self._judged(now, self._steepest(now, slopes))
        if found is None or found.likeness <= now.likeness:
            self._judged(now, self._everywhere(now, slopes))

    def _judged(self, now: Guess, changed: Iterable[Guess]) -> Guess | None:
        """Judge changes of a guess, and the best of them with others beside it; return the likest."""
        new = (one for one in changed if _key(one) not in self._left)
        found = sorted(self.judge(new), key=lambda one: -one.likeness)
        if not found:
            return None
        both = [_both(now, found[0], other) for other in found[1:_COMBINED] if other.likeness > now.likeness]
        return max([found[0], *self.judge(one for one in both if one is not None)], key=lambda one: one.likeness)

    def judge(self, guesses: Iterable[Guess]) -> list[Guess]:
        """Return guesses with their likeness, as far as evaluations last; the likest of all are kept."""
        found: dict[_Key, Guess] = {}
        new: dict[_Key, Guess] = {}
        for one in guesses:
            if (key := _key(one)) in self._known:
                found[key] = replace(one, likeness=self._known[key])
            elif not self._over(len(new)):
                new[key] = one
                if len(new) == _AT_ONCE:
                    found |= self._told(new)
                    new = {}
            else:
                break
        return list((found | self._told(new)).values())

    def _over(self, more: int = 0) -> bool:
        """Say whether no evaluations are left; the start is judged in any case."""
        return bool(self._kept) and self._like.spent + more >= self._how.evaluations

    def _told(self, new: dict[_Key, Guess]) -> dict[_Key, Guess]:
        if not new:
            return {}
        told = self._like(*self._tensors(list(new.values()))).tolist()
        self._known |= dict(zip(new, told, strict=True))
        found = {key: replace(one, likeness=self._known[key]) for key, one in new.items()}
        self._kept = _likest([*self._kept, *found.values()])
        step(self._what, min(self._like.spent, self._how.evaluations), self._how.evaluations)
        return found

    def _tensors(self, guesses: Sequence[Guess]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ids and mask, [K, B, T], and labels, [K, B]."""
        whole = [self._how.whole(one) for one in guesses]
        longest, device = max(len(words) for one in whole for words in one), self._like.table.device
        ids = torch.tensor([[[*words, *[0] * (longest - len(words))] for words in one] for one in whole], device=device)
        lengths = torch.tensor([[len(words) for words in one] for one in whole], device=device)
        mask = torch.arange(longest, device=device) < lengths[..., None]
        labels = [one.labels for one in guesses if one.labels is not None]
        return ids, mask, torch.tensor(labels, device=device) if labels else None

    def _slopes_of(self, guess: Guess) -> Tensor:
        """Return [slots, V] of a guess."""
        slopes = self._like.slopes(*self._tensors([guess]))[0]
        if not guess.slots:
            return slopes.new_zeros(0, slopes.shape[-1])
        places = [(row, len(self._how.frames[row][0]) + at) for row, at in guess.slots]
        found = slopes[[row for row, _ in places], [at for _, at in places]]
        return found.masked_fill(~self._how.words, -torch.inf)

    def _steepest(self, now: Guess, slopes: Tensor) -> Iterator[Guess]:
        """Yield the steepest exchanges of all slots, as words put in beside these slots too, and what costs little."""
        slots, count = now.slots, min(self._how.proposals, int(self._how.words.sum()) * len(slopes))
        flat = slopes.flatten().topk(count).indices.tolist()
        steep = [(*slots[at // slopes.shape[1]], at % slopes.shape[1]) for at in flat]
        yield from (_exchanged(now, row, at, word) for row, at, word in steep)
        yield from self._labeled(now)
        growing = [one for one in steep if self._may_grow(now, one[0])]
        yield from (_put_in(now, row, at + behind, word) for row, at, word in growing for behind in (0, 1))
        yield from self._left_out(now)
        yield from islice(self._moved(now), self._how.proposals)

    def _everywhere(self, now: Guess, slopes: Tensor) -> Iterator[Guess]:
        """Yield changes at every slot, slots in random order."""
        slots, each = now.slots, max(1, self._how.proposals // 3)
        for at in torch.randperm(len(slots), generator=self._rng).tolist():
            row, place = slots[at]
            steep = slopes[at].topk(min(each, int(self._how.words.sum()))).indices.tolist()
            words = [*self.near(now.sentences[row][place], each), *steep]
            words += self._usual(each)
            yield from (_exchanged(now, row, place, word) for word in words)
            if self._may_grow(now, row):
                last = place == len(now.sentences[row]) - 1
                yield from (_put_in(now, row, place + behind, word) for word in words for behind in range(1 + last))
        yield from self._moved(now)

    def _may_grow(self, now: Guess, row: int) -> bool:
        return self._how.longest is not None and len(now.sentences[row]) < self._how.longest

    def _labeled(self, now: Guess) -> Iterator[Guess]:
        for row, label in enumerate(now.labels or ()):
            for other in range(self._how.classes):
                if other != label and now.labels is not None:
                    yield replace(now, labels=(*now.labels[:row], other, *now.labels[row + 1 :]), likeness=-2.0)

    def _left_out(self, now: Guess) -> Iterator[Guess]:
        for row, at in now.slots if self._how.longest is not None else ():
            words = now.sentences[row]
            if len(words) > self._how.shortest:
                yield now.with_words(row, (*words[:at], *words[at + 1 :]))

    def _moved(self, now: Guess) -> Iterator[Guess]:
        """Yield the guess with two words exchanged or one moved, in random order."""
        pairs = list(combinations(now.slots, 2))
        for at in torch.randperm(len(pairs), generator=self._rng).tolist():
            (row, one), (other_row, other) = pairs[at]
            first, second = now.sentences[row][one], now.sentences[other_row][other]
            yield _exchanged(_exchanged(now, row, one, second), other_row, other, first)
            if row == other_row and other > one + 1:
                words = now.sentences[row]
                yield now.with_words(row, (*words[:one], *words[one + 1 : other + 1], first, *words[other + 1 :]))
                yield now.with_words(row, (*words[:one], second, *words[one:other], *words[other + 1 :]))

    def near(self, word: int, count: int) -> list[int]:
        """Return the words whose vectors are most like a word's."""
        alike = self._like.table @ self._like.table[word] / self._lengths.clamp_min(1e-12)
        alike = alike.masked_fill(~self._how.words, -torch.inf)
        alike[word] = -torch.inf
        return [at for at in alike.topk(min(count, len(alike))).indices.tolist() if alike[at] > -torch.inf]

    def _usual(self, count: int) -> list[int]:
        marks, words = self._marks, self._frequent
        order = torch.randperm(len(words), generator=self._rng)[: max(0, count - len(marks))].tolist()
        return [*marks, *(words[at] for at in order)]

    def _kicked(self) -> Guess:
        """Return one of the kept guesses without a third of its words; of known lengths, with others there."""
        now = self._kept[int(torch.randint(len(self._kept), (), generator=self._rng))]
        slots, grows = now.slots, self._how.longest is not None
        slopes = None if grows else self._slopes_of(now)
        some = torch.randperm(len(slots), generator=self._rng)[: max(_KICKED, len(slots) // 3)].tolist()
        for at in sorted(some, reverse=True):
            row, place = slots[at]
            words = now.sentences[row]
            if slopes is None:
                kept = (*words[:place], *words[place + 1 :])
                now = now.with_words(row, kept) if len(kept) >= self._how.shortest else now
                continue
            near = slopes[at].topk(min(_NEAR, int(self._how.words.sum()))).indices
            now = _exchanged(now, row, place, int(near[int(torch.randint(len(near), (), generator=self._rng))]))
        return now


def _key(guess: Guess) -> _Key:
    return guess.sentences, guess.labels


def _likest(guesses: Iterable[Guess]) -> list[Guess]:
    """Return the likest of several guesses, not all of one length."""
    kept: list[Guess] = []
    seen: dict[tuple[int, ...], int] = {}
    for one in sorted({_key(one): one for one in guesses}.values(), key=lambda one: -one.likeness):
        size = tuple(map(len, one.sentences))
        if seen.get(size, 0) < _OF_A_LENGTH:
            kept.append(one)
            seen[size] = seen.get(size, 0) + 1
        if len(kept) == _KEPT:
            break
    return kept


def _exchanged(now: Guess, row: int, at: int, word: int) -> Guess:
    words = now.sentences[row]
    return now.with_words(row, (*words[:at], word, *words[at + 1 :]))


def _put_in(now: Guess, row: int, at: int, word: int) -> Guess:
    words = now.sentences[row]
    return now.with_words(row, (*words[:at], word, *words[at:]))


def _both(now: Guess, one: Guess, other: Guess) -> Guess | None:
    """Return a guess with the changes of two; None where one of them has other lengths."""
    three = list(zip(now.sentences, one.sentences, other.sentences, strict=True))
    if any(not len(old) == len(a) == len(b) for old, a, b in three):
        return None
    sentences = tuple(_merged(*words) for words in three)
    if now.labels is None or one.labels is None or other.labels is None:
        return Guess(sentences)
    return Guess(sentences, _merged(now.labels, one.labels, other.labels))


def _merged(old: Sequence[int], one: Sequence[int], other: Sequence[int]) -> Sentence:
    """Return what changed in the first, and else the second."""
    return tuple(b if b != a else c for a, b, c in zip(old, one, other, strict=True))
