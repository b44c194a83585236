"""What came back to a decoder's words in its first block, and which words before and behind them explain it.

A query's signal is made of the keys before it, a key's of its own query and those behind it, turned by their distance:
what is known of both, and how well, is all that `past` puts sentences together from.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SLACK, _DEVIATIONS = 1.2, 6.0
"""A signal is explained below this chi^2 per degree of freedom: errors are told to a tenth (SmolLM2: 0.8 to 1.13 over
500 degrees), and so many standard deviations of chi^2 on top."""
_FREE = 1
"""Fewest coordinates a head that the past must leave free."""
_HEARD = 0.1
"""Largest error of a word as a share of the other words' signals: above it, that nothing came back is not known."""
_TOLD = 3.0
"""Words behind a key leave so much less of its signal than none do: the best of thousands of wrong runs makes up for a
weak signal."""
_RUNS, _FEW = 16, 2
"""Runs of words behind a key that are followed, and how many words its answer proves."""

Place = tuple[int, ...]
"""The words before, first to last."""
Returned = Callable[[str, Tensor, Tensor], Tensor]
"""(role, words [w], slopes [w or n, heads, t, h] at what attention compares) -> slopes at what a matrix made."""


@dataclass(frozen=True)
class WordSignals:
    """What came back to queries and keys of block 0, word by word.

    Args:
        toward_queries: [W, H, h] signals.
        toward_keys: [W, G, h]; G heads share keys in groups of H / G.
        query_errors: [W, H, h] their standard deviations.
        key_errors: [W, G, h].
        queries: [W, H, h] as attention compares them, before they are turned.
        keys: [W, G, h].
        turned: turns vectors [n, heads, h] by positions [n].
        positions: of the words, where their rows have one; None where a word fits anywhere.
        returned: takes slopes through what stands between a matrix and the comparison; None where nothing does.
        lost: coordinates of a head that it always loses.
        balanced: True where what comes back to a query's scores sums to zero, as behind a softmax of plain products.
    """

    toward_queries: Tensor
    toward_keys: Tensor
    query_errors: Tensor
    key_errors: Tensor
    queries: Tensor
    keys: Tensor
    turned: Callable[[Tensor, Tensor], Tensor]
    positions: Sequence[int] | None = None
    returned: Returned | None = None
    lost: int = 0
    balanced: bool = True

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
        return self._rest("q", index, self._beside(atoms, own))

    def needed(self, word: int, places: Sequence[Place]) -> bool:
        """Say whether no word of a word's places could be left out: each got something back from its query.

        A place with one word too many explains as well, and so do two places that have each a part of the true one.
        """
        seen = sorted({(w, n - len(place)) for place in places for n, w in enumerate(place)})
        keys = self._turned(self.keys, [w for w, _ in seen], [n for _, n in seen])
        keys = keys.repeat_interleave(self.queries.shape[1] // self.keys.shape[1], 0)
        own = self.keys[word].repeat_interleave(self.queries.shape[1] // self.keys.shape[1], 0)[:, None]
        without = [self._beside(torch.cat([keys[:, :n], keys[:, n + 1 :]], 1), own) for n in range(len(seen))]
        return min(self._rest("q", torch.tensor([word], device=own.device), torch.stack(without)), default=0.0) >= 1

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
        return self._rest("k", torch.tensor([word], device=self.keys.device), torch.stack(atoms)) if atoms else []

    def _beside(self, keys: Tensor, own: Tensor) -> Tensor:
        """Return what a query's signal is made of, of keys [..., t, h] and the word's own [..., 1, h]."""
        if self.balanced:  # what is added to one key is taken from the word's own
            return keys - own
        return torch.cat([keys + torch.zeros_like(own), own + torch.zeros_like(keys[..., :1, :])], -2)

    def _rest(self, role: str, words: Tensor, atoms: Tensor) -> list[float]:
        """Return what atoms leave of some words' signals; see `_left`."""
        signals, errors = (
            (self.toward_queries, self.query_errors) if role == "q" else (self.toward_keys, self.key_errors)
        )
        back = atoms if self.returned is None else self.returned(role, words, atoms)
        return _left(signals[words], errors[words], back, self.lost)

    def behind(self, word: int, words: Sequence[int], most: int) -> tuple[int, ...]:
        """Return the words behind one of a single place, nearest first; none where no few of them explain its key.

        Args:
            word: the word.
            words: that may follow.
            most: how many at most.
        """
        alone = self.ends(word, [()])[0]
        if alone < 1:
            return ()
        runs: list[tuple[int, ...]] = [()]
        for far in range(1, most + 1):
            longer = [
                (*run, w)
                for run in runs
                for w in words
                if self.positions is None or self.positions[w] == self.positions[word] + far
            ]
            left = self.ends(word, [list(zip(run, range(1, far + 1), strict=True)) for run in longer])
            best = sorted(zip(left, longer, strict=True))[:_RUNS]
            if best and best[0][0] < min(1.0, alone / _TOLD):
                return best[0][1]
            runs = [run for _, run in best]
        return ()

    def tells(self, word: int, words: Sequence[int]) -> bool:
        """Say whether the key of a word of a single place tells what follows: few words, each of them needed.

        Of many words some explain any key: a run of eight was found that was not there. And a key that is hardly known
        says nothing of what follows.
        """
        futures = list(zip(words, range(1, len(words) + 1), strict=True))
        if len(futures) > _FEW or not _known(self.toward_keys, self.key_errors, word):
            return False
        without = self.ends(word, [futures[:n] + futures[n + 1 :] for n in range(len(futures))])
        return self.ends(word, [futures])[0] < 1 and min(without, default=_TOLD) >= _TOLD

    def whole(self, word: int) -> float:
        """Return the signal of a word's query as a share of the limit below which nothing came back."""
        size = (self.toward_queries[word] / self.query_errors[word]).square().mean()
        return float(size) / _limit(self.queries[word].numel())

    def silent(self) -> Tensor:
        """Return [W] bool: words whose query got no signal back, which are first words and nothing else."""
        return torch.tensor([self.whole(word) < 1 for word in range(len(self.queries))])

    def heard(self, word: int) -> bool:
        """Say whether a silent word's signal is known well enough: another word's would have shown."""
        silent = self.silent()
        return not bool(silent.all()) and _known(self.toward_queries[~silent], self.query_errors, word)


def _known(signals: Tensor, errors: Tensor, word: int) -> bool:
    """Say whether a word's error is small beside the middle one of some signals [n, heads, h]."""
    error = float(errors[word].square().mean().sqrt())
    return error < _HEARD * float(signals.square().mean((1, 2)).sqrt().median())


def _limit(free: int) -> float:
    return _SLACK + _DEVIATIONS * math.sqrt(2 / max(free, 1))


def _left(signals: Tensor, errors: Tensor, atoms: Tensor, lost: int) -> list[float]:
    """Return the chi^2 of what atoms leave, as a share of its limit: below 1 they explain. Infinite where none is free.

    Args:
        signals: [w, H, h].
        errors: [w, H, h].
        atoms: [w or 1, H, t, h].
        lost: coordinates of a head that no atom has.
    """
    heads, count, width = atoms.shape[1:]
    free = heads * (width - count)
    if width - lost - count < _FREE:
        return [math.inf] * len(signals)
    target = (signals / errors)[..., None]
    basis = torch.linalg.qr((atoms / errors[:, :, None]).mT).Q
    rest = target - basis @ (basis.mT @ target)
    shares: list[float] = (rest.square().sum((1, 2, 3)) / free / _limit(free)).tolist()
    return shares
