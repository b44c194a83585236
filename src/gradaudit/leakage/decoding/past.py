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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradaudit.progress import step

_SLACK, _DEVIATIONS = 1.2, 6.0
"""A signal is explained below this chi^2 per degree of freedom: errors are told to a tenth (SmolLM2: 0.8 to 1.13 over
500 degrees), and so many standard deviations of chi^2 on top."""
_FREE = 1
"""Fewest coordinates a head that the past must leave free."""
_PLACES, _BENT = 8, 0.5
"""Most places of one word that are told apart by its query, and the share of a head's coordinates that they may take:
of many places some explain anything."""

_DEEP, _BEAM = 6, 32
"""Open words tried one behind the other, and how many such runs are followed behind each sentence so far."""
_HEARD = 0.1
"""Largest error of a silent word as a share of the other words' signals: above it, nothing came back is not known."""
_SHARP, _APART = 10.0, 2.0
"""The place that explains a signal leaves a tenth of it at most, and the next best one is so far above the limit."""

Place = tuple[int, ...]
"""The words before, first to last."""


@dataclass(frozen=True)
class WordSignals:
    """What came back to queries and keys of block 0, word by word.

    Args:
        toward_queries: [W, H, h] signals.
        toward_keys: [W, G, h]; G heads share keys in groups of H / G.
        query_errors: [W, H, h] their standard deviations.
        key_errors: [W, G, h].
        queries: [W, H, h] before they are turned.
        keys: [W, G, h].
        turned: turns vectors [n, heads, h] by positions [n].
        positions: of the words, where their rows have one; None where a word fits anywhere.
    """

    toward_queries: Tensor
    toward_keys: Tensor
    query_errors: Tensor
    key_errors: Tensor
    queries: Tensor
    keys: Tensor
    turned: Callable[[Tensor, Tensor], Tensor]
    positions: Sequence[int] | None = None

    def fits(self, word: int, place: Place) -> bool:
        """Say whether a word can stand there."""
        return self.positions is None or self.positions[word] == len(place)

    def _turned(self, vectors: Tensor, words: Sequence[int], offsets: Sequence[int]) -> Tensor:
        """Return some words' vectors turned by offsets, [heads, n, h]."""
        device = vectors.device
        some = vectors[torch.tensor(words, dtype=torch.long, device=device)]
        return self.turned(some, torch.tensor(offsets, device=device)).transpose(0, 1)

    def past(self, place: Place) -> Tensor:
        """Return the keys of a place's words as a query behind them sees them, [H, t, h]."""
        length = len(place)
        keys = self._turned(self.keys, place, range(-length, 0))
        return keys.repeat_interleave(self.queries.shape[1] // self.keys.shape[1], 0)

    def unexplained(self, words: Sequence[int], places: Sequence[Sequence[Place]]) -> list[float]:
        """Return by word what its places leave of its query's signal, below 1 where they explain it.

        Args:
            words: w words.
            places: of each; of the same lengths for all words.
        """
        device = self.keys.device
        index = torch.tensor(words, dtype=torch.long, device=device)
        own = self.keys[index].repeat_interleave(self.queries.shape[1] // self.keys.shape[1], 1)[:, :, None]
        if all(len(set(some)) == 1 for some in zip(*places, strict=True)):
            atoms = torch.cat([self.past(place) for place in places[0]], 1)[None]
        else:
            atoms = torch.stack([torch.cat([self.past(place) for place in some], 1) for some in places])
        # the rows of S sum to zero: what is added to one key is taken from the word's own
        return _left(self.toward_queries[index], self.query_errors[index], atoms - own)

    def needed(self, word: int, places: Sequence[Place]) -> bool:
        """Say whether no word of a word's places could be left out: each got something back from its query.

        A place with one word too many explains as well, and so do two places that have each a part of the true one.
        """
        seen = sorted({(w, n - len(place)) for place in places for n, w in enumerate(place)})
        keys = self._turned(self.keys, [w for w, _ in seen], [n for _, n in seen])
        keys = keys.repeat_interleave(self.queries.shape[1] // self.keys.shape[1], 0)
        own = self.keys[word].repeat_interleave(self.queries.shape[1] // self.keys.shape[1], 0)[:, None]
        without = [torch.cat([keys[:, :n], keys[:, n + 1 :]], 1) - own for n in range(len(seen))]
        signals, errors = self.toward_queries[word, None], self.query_errors[word, None]
        return min(_left(signals, errors, torch.stack(without)), default=0.0) >= 1

    def ends(self, word: int, futures: Sequence[Sequence[tuple[int, int]]]) -> list[float]:
        """Return what a word and others behind it leave of its key's signal, below 1 where they explain it.

        Args:
            word: occurs in one place.
            futures: tried one by one, as many words in each: a word and its distance.
        """
        group = self.queries.shape[1] // self.keys.shape[1]
        atoms = []
        for behind in futures:
            seen = self._turned(self.queries, (word, *(w for w, _ in behind)), (0, *(n for _, n in behind)))
            heads, count, width = seen.shape
            atoms.append(seen.reshape(heads // group, group * count, width))
        signals, errors = self.toward_keys[word, None], self.key_errors[word, None]
        return _left(signals, errors, torch.stack(atoms)) if atoms else []

    def whole(self, word: int) -> float:
        """Return the signal of a word's query as a share of the limit below which nothing came back."""
        size = (self.toward_queries[word] / self.query_errors[word]).square().mean()
        return float(size) / _limit(self.queries[word].numel())

    def silent(self) -> Tensor:
        """Return [W] bool: words whose query got no signal back, which are first words and nothing else."""
        return torch.tensor([self.whole(word) < 1 for word in range(len(self.queries))])

    def heard(self, word: int) -> bool:
        """Say whether a silent word's signal is known well enough: another word's would have shown."""
        others = self.toward_queries[~self.silent()].square().mean((1, 2)).sqrt()
        error = float(self.query_errors[word].square().mean().sqrt())
        return len(others) > 0 and error < _HEARD * float(others.median())


def _limit(free: int) -> float:
    return _SLACK + _DEVIATIONS * math.sqrt(2 / max(free, 1))


def _left(signals: Tensor, errors: Tensor, atoms: Tensor) -> list[float]:
    """Return the chi^2 of what atoms leave, as a share of its limit: below 1 they explain. Infinite where none is free.

    Args:
        signals: [w, H, h].
        errors: [w, H, h].
        atoms: [w or 1, H, t, h].
    """
    heads, count, width = atoms.shape[1:]
    free = heads * (width - count)
    if width - count < _FREE:
        return [math.inf] * len(signals)
    target = (signals / errors)[..., None]
    basis = torch.linalg.qr((atoms / errors[:, :, None]).mT).Q
    rest = target - basis @ (basis.mT @ target)
    shares: list[float] = (rest.square().sum((1, 2, 3)) / free / _limit(free)).tolist()
    return shares


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
        may end any sentence.
        """
        if len(sentence) < 2 or any(len(other) < 2 for other in self.sentences()) or not self.told.heard(sentence[0]):
            return False
        last = self.last(sentence)
        # that the first word is one shows in what the next ones were made of
        for word in sentence[1:-1] if last and len(sentence) > 2 else sentence[1:]:
            if word in self.open_ or not self.told.needed(word, self.places[word]):
                return False
        return last or self.told.ends(sentence[-1], [()])[0] < 1

    def last(self, prefix: Place) -> bool:
        """Say whether the key before a prefix's last word got something back from that word, and from none behind."""
        if len(prefix) < 2 or prefix[-2] in self.open_ or len(self.places[prefix[-2]]) != 1:
            return False
        alone, followed = (self.told.ends(prefix[-2], [some])[0] for some in ([], [(prefix[-1], 1)]))
        return followed < 1 <= alone

    def add(self, word: int, place: Place) -> Place:
        """Put a word to a place, and return the longer prefix."""
        prefix = (*place, word)
        if prefix not in self.grown:
            self.grown.append(prefix)
        if place not in self.places.setdefault(word, []):
            self.places[word].append(place)
            if self.told.unexplained([word], [self.places[word]])[0] < 1:
                self.open_.discard(word)
            if word not in self.open_:
                self.prune(word, prefix)
        return prefix

    def prune(self, word: int, latest: Place) -> None:
        """Take back the places of an explained word that it does not need, where nothing follows."""
        inner = {prefix[:-1] for prefix in self.grown}
        for place in self.places[word][:]:
            others = [p for p in self.places[word] if p != place]
            spare = (*place, word) != latest and (*place, word) not in inner
            if others and spare and self.told.unexplained([word], [others])[0] < 1:
                self.places[word].remove(place)
                self.grown.remove((*place, word))

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
        close = [word for word, value in left.items() if value < min(1.0, self.before(word) / _SHARP)]
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

    def beside(self, word: int, places: Sequence[Place], known: Sequence[Place]) -> list[tuple[float, Place]]:
        """Return what each place leaves of a word's signal beside known ones, least first, and the place."""
        some = [p for p in places if self.told.fits(word, p)]
        return sorted((self.told.unexplained([word], [[*known, p]])[0], p) for p in some)

    def grow(self, prefixes: Sequence[Place]) -> None:
        """Grow prefixes by every word that one place more explains, as far as that goes."""
        queue = list(prefixes)
        while queue:
            place = queue.pop(0)
            queue += [self.add(word, place) for word in self.fitting(place)]
            step(f"decode: {len(self.grown)} words in place", len(self.grown))


def read_sentences(told: WordSignals) -> Tree:
    """Return the sentences that a decoder's words make.

    Words of one place are put there at once. One that occurs elsewhere, too, is told by the key before it (`_behind`),
    by what follows it (`_through`), or by all its places together (`_together`).

    Args:
        told: what came back to queries and keys.
    """
    silent = told.silent()
    firsts = torch.where(silent)[0].tolist()
    tree = Tree(told, open_=set(torch.where(~silent)[0].tolist()))
    tree.grow([tree.add(word, ()) for word in firsts])
    while any(way(tree) for way in (_behind, _through, _together)):
        pass
    _cut(tree)
    return tree


def _behind(tree: Tree) -> bool:
    """Let the keys of last words say which word comes next: nothing but the queries behind it comes back to a key."""
    grew = False
    for prefix in tree.sentences():
        last = prefix[-1]
        if len(tree.places[last]) != 1 or last in tree.open_ or tree.told.ends(last, [()])[0] < 1:
            continue
        words = [w for w in sorted({*tree.places, *tree.open_}) if tree.told.fits(w, prefix)]
        left = tree.told.ends(last, [[(w, 1)] for w in words])
        value, best = min(zip(left, words, strict=True), default=(math.inf, 0))
        if value < 1:
            tree.grow([tree.add(best, prefix)])
            grew = True
    return grew


def _cut(tree: Tree) -> None:
    """Cut off last words of which nothing came back to the key before them: all of it came from other branches."""
    for sentence in tree.sentences():
        place = sentence[:-1]
        if not place or len(tree.places[place[-1]]) != 1:
            continue
        others = {p for p in tree.grown if p[: len(place)] == place and len(p) > len(place) and p != sentence}
        behind = sorted({(p[-1], len(p) - len(place)) for p in others})
        if behind and tree.told.ends(place[-1], [behind])[0] < 1:
            tree.grown.remove(sentence)
            tree.places[sentence[-1]].remove(place)


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


def _together(tree: Tree) -> bool:
    """Explain an open word by several places at once: the one that explains most, then the next."""
    for word in sorted(tree.open_):
        chosen = list(tree.places.get(word, []))
        before = tree.before(word)
        while len(chosen) < _PLACES:
            left = tree.beside(word, [p for p in tree.grown if p not in chosen], chosen)
            if not left or sum(map(len, [*chosen, left[0][1]])) > _BENT * tree.told.queries.shape[2]:
                break
            (value, best), others = left[0], left[1:]
            chosen.append(best)
            if value < 1:
                # of many places some explain anything, little by little: the last one has to be the key
                rest = {p: [q for q in chosen if q != p] for p in chosen}
                needed = all(tree.whole_place(word, rest[p], p) for p in chosen)
                if needed and value < before / _SHARP and (not others or others[0][0] > _APART):
                    longer = [tree.add(word, p) for p in chosen]
                    tree.grow([p for p in longer if p in tree.grown])
                    return True
                break
            before = value
    return False
