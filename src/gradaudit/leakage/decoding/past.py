"""A decoder's sentences from its words alone: what came back to a query can only be made of the keys before it.

Rotary models add no position to their first block, so that its rows are words, each once however often it occurs, and
with these known exactly the gradients of W_q and W_k are signals, word by word: delta_q(i) = sum_j S_ij k_j by head,
over the words j up to i, with keys turned by the distance of j from i; the rows of S sum to zero. A first word has no
past: its signal is zero. The second lies along one known direction a head, and so on: of h coordinates a head, t words
before it leave h - t that nothing can bend. So sentences grow from their first words, each word proven by the chi^2 of
what its past leaves of its signal. In SmolLM2 (9 heads of 64), one step of AdamW leaves right words at 0.8 to 1.1 and
wrong ones at thousands. A word that occurs in several places lies in the sum of their spans, and keys tell by the
queries behind them whether a sentence goes on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gradaudit.leakage.decoding.word_signals import Place, WordSignals
from gradaudit.progress import step

_BEHIND = 3
"""Words that a key is asked for."""
_DEEP, _BEAM = 6, 32
"""Open words tried one behind the other, and how many such runs are followed behind each sentence so far."""


@dataclass
class Tree:
    """Sentences in the making.

    Args:
        told: the signals.
        places: by word, where it was found.
        open_: words whose signal is not explained yet.
        grown: every prefix.
    """

    told: WordSignals
    places: dict[int, list[Place]] = field(default_factory=dict)
    open_: set[int] = field(default_factory=set)
    grown: list[Place] = field(default_factory=list)

    def sentences(self) -> list[Place]:
        """Return the prefixes that nothing follows."""
        inner = {prefix[:-1] for prefix in self.grown}
        return [prefix for prefix in self.grown if prefix not in inner]

    def certain(self, sentence: Place) -> bool:
        """Say whether every word of a sentence is explained where it is and nowhere else, and nothing can follow.

        A word whose query got nothing back may be a first one, or one that was hardly heard: where it stands alone, it
        may end any sentence. What follows the last word that occurs nowhere else is told by that one's key.
        """
        if len(sentence) < 2 or any(len(other) < 2 for other in self.sentences()) or not self.told.heard(sentence[0]):
            return False
        told = max((n for n in range(1, len(sentence)) if self.once(sentence[n])), default=0)
        # that the first word is one shows in what the next ones were made of
        for word in sentence[1 : told + 1]:
            if word in self.open_ or not self.told.needed(word, self.places[word]):
                return False
        return told > 0 and self.told.tells(sentence[told], sentence[told + 1 :])

    def once(self, word: int) -> bool:
        """Say whether a word occurs in one place, which explains it."""
        return word not in self.open_ and len(self.places.get(word, [])) == 1

    def add(self, word: int, place: Place) -> Place:
        """Put a word to a place, and return the longer prefix."""
        prefix = (*place, word)
        if prefix not in self.grown:
            self.grown.append(prefix)
        if place not in self.places.setdefault(word, []):
            self.places[word].append(place)
            if self.told.unexplained([word], [self.places[word]])[0] < 1:
                self.open_.discard(word)
        return prefix

    def left(self, place: Place) -> dict[int, float]:
        """Return what a place leaves of each open word's signal, beside those where it is known to be."""
        by_count: dict[tuple[int, ...], list[int]] = {}
        for word in sorted(self.open_):
            if place not in self.places.get(word, []) and self.told.fits(word, place):
                by_count.setdefault(tuple(len(p) for p in self.places.get(word, [])), []).append(word)
        left: dict[int, float] = {}
        for words in by_count.values():
            values = self.told.unexplained(words, [[*self.places.get(w, []), place] for w in words])
            left |= dict(zip(words, values, strict=True))
        return {word: value for word, value in left.items() if not math.isinf(value)}

    def before(self, word: int) -> float:
        """Return what the places where an open word is known to be leave of its signal."""
        known = self.places.get(word, [])
        return self.told.unexplained([word], [known])[0] if any(known) else self.told.whole(word)

    def fitting(self, place: Place, left: dict[int, float] | None = None) -> list[int]:
        """Return the open words whose signal a place explains, beside those where they are known to be."""
        left = self.left(place) if left is None else left
        close = [word for word, value in left.items() if value < 1]
        return [word for word in close if self.whole_place(word, self.places.get(word, []), place)]

    def whole_place(self, word: int, known: Sequence[Place], place: Place) -> bool:
        """Say whether a place explains a word, and does not without its first word: one too many explains as well."""
        shorter = [*known, place[1:]] if len(place) > 1 else list(known)
        left = self.told.unexplained([word], [shorter])[0] if any(shorter) else self.told.whole(word)
        return left >= 1

    def proof(self, place: Place) -> float:
        """Return the least that a place leaves of any open word's signal which it explains; infinite for none."""
        left = self.left(place)
        return min((left[word] for word in self.fitting(place, left)), default=math.inf)

    def grow(self, prefixes: Sequence[Place]) -> None:
        """Grow prefixes by every word that one place more explains, as far as that goes."""
        queue = list(prefixes)
        while queue:
            place = queue.pop(0)
            queue += [self.add(word, place) for word in self.fitting(place)]
            step("decode: words in place", len(self.grown))


def read_sentences(told: WordSignals) -> Tree:
    """Return the sentences that a decoder's words make.

    Words of one place are put there at once. One of several places is told by the key before it (`_behind`), or
    by what follows it (`_through`).

    Args:
        told: what came back to queries and keys.
    """
    silent = told.silent()
    firsts = torch.where(silent)[0].tolist()
    tree = Tree(told, open_=set(torch.where(~silent)[0].tolist()))
    tree.grow([tree.add(word, ()) for word in firsts])
    while _behind(tree) or _through(tree):
        pass
    return tree


def _behind(tree: Tree) -> bool:
    """Let the keys of last words say which few come next: nothing but the queries behind it comes back to a key."""
    grew = False
    for prefix in tree.sentences():
        if tree.once(prefix[-1]):
            words = sorted(w for w in {*tree.places, *tree.open_} if not tree.once(w))
            behind = tree.told.behind(prefix[-1], words, _BEHIND)
            if behind:
                tree.grow([tree.add(word, (*prefix, *behind[:n])) for n, word in enumerate(behind)][-1:])
                grew = True
    return grew


def _through(tree: Tree) -> bool:
    """Look for words that are explained behind one or several open ones, the likeliest first.

    An open word's place takes its share of the word's signal; which of many does is sure only once a word of one place
    fits behind. A word that begins a sentence and occurs elsewhere, too, is tried like an open one.
    """
    starts: list[Place] = [(), *tree.sentences()]
    beams: list[list[tuple[float, Place]]] = [[(0.0, place)] for place in starts]
    for depth in range(_DEEP):
        proofs: list[tuple[float, float, Place, int]] = []
        for at, start in enumerate(starts):
            longer: list[tuple[float, Place]] = []
            for score, place in beams[at]:
                if place == ():
                    longer += [(0.0, (w,)) for w in tree.places.keys() | tree.open_ if tree.told.fits(w, ())]
                    continue
                left = tree.left(place)
                longer += [(score + math.log(left[w] / tree.before(w)), (*place, w)) for w in left]
            longer = sorted(some for some in longer if some[1] not in tree.grown)
            beams[at] = longer if depth == 0 else longer[:_BEAM]
            proofs += [(score, tree.proof(place), place, len(start)) for score, place in beams[at]]
        # a run with one word wrong may do where little came back from it: the one counts that its own words speak for
        proven = [one for one in proofs if one[1] < 1]
        if proven:
            _, _, place, start_length = min(proven)
            for n in range(start_length, len(place)):
                tree.add(place[n], place[:n])
            tree.grow([place])
            return True
    return False
