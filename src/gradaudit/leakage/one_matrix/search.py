"""The search for one sentence in the space of one matrix's inputs: chosen word by word, then mended among its words.

A word's row depends mostly on the word and its place and less on the words around, so that words are found in rows that
were made among any words. Among nearly right words the rows are nearly right, and the right sentence fills the space.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from gradaudit.leakage.one_matrix.drawn_masks import DrawnMasks
from gradaudit.leakage.one_matrix.signal import Fit, Remaining, Signal, shares
from gradaudit.leakage.one_matrix.word_rows import (
    UsualRows,
    WordRows,
    framed,
    framing_places,
    framing_rows,
    rows_among,
    rows_of,
    usual_rows,
)
from gradaudit.leakage.priors import frequent_tokens, marks
from gradaudit.models.base import TextModel
from gradaudit.progress import step

FILLED = 1e-2
"""Directions that a right sentence leaves apart are fewer than this: 1e-6 by rounding (of four sentences, 3e-3), and
0.1 with one word wrong (of four, 0.08 without its full stop). MiniLM, in development."""
_SHORT, _SHORTEST = 1500, 100
"""Words at a place that are looked at in the first choice, and so many at least where sentences are long."""
_ROWS = 32_768
"""Rows looked at in the first choice: bounds memory."""
_TRIED, _SWAPPED = 48, 6
"""Words tried at a place among the words of a guess, beside the guess's own; and of these, for an exchange."""
_USUAL = 64
"""Frequent words that are tried at every place, beside marks: what they say is mostly about the words around, and among
those of a first guess their rows are far from any (MiniLM, block 3, p: a full stop ranked 22,690th of 30,522)."""
_TURNS = 40
"""Turns of mending a guess."""
_WORST, _WIDE = 3, 1024
"""Places, those with the worst words, at which so many words are tried when nothing else helps."""
_NEARLY = 0.3
"""Every word is tried where a guess leaves no more than this share of its words' directions apart. Of a word in three
pieces, all wrong, the pieces' rows in a usual sentence ranked 382nd to 8,105th, and among the guess's own words first
to 40th: the middle one first, and then the others (MPNet, block 4, o; a guess of 11 words, 2.3 apart)."""
_REARRANGED = 40_000
"""Tokens of the rearranged sentences that are looked at: bounds time."""
_REDRAWN = 0.3
"""Share of the places that are redrawn."""


class SentenceSearch:
    """The search for a sentence of known length.

    Args:
        model: an encoder.
        signal: the space.
        words: every word's row.
        length: tokens of the sentence, special ones included.
        bag: token ids that are tried at every place, beside those that are likely there.
        rng: for the words around, where none are known yet.
        masked: what dropout makes of sentences; None where it is off.
        barred: [n] token ids that no sentence holds; the special ones when None.
    """

    def __init__(
        self,
        model: TextModel,
        signal: Signal,
        words: WordRows,
        length: int,
        bag: Tensor,
        rng: torch.Generator,
        masked: DrawnMasks | None = None,
        barred: Tensor | None = None,
    ) -> None:
        self.model, self.signal, self.words, self.length, self.bag, self.rng = model, signal, words, length, bag, rng
        self.masked = masked
        self.first = int(signal.differences)  # place of the first row
        self.framing = framing_rows(model, signal, length)
        self.places = [p for p in range(length) if p not in framing_places(model, length)]
        self.barred = barred_words(model, None) if barred is None else barred
        usual = torch.tensor([*marks(model), *frequent_tokens(model)[:_USUAL]], device=model.device)
        self.usual = usual[~torch.isin(usual, self.barred)]
        self.possible = model.vocabulary_size - len(self.barred)

    def whole(self, fit: Fit) -> bool:
        """Say whether a sentence fills the space, or as much of it as dropout lets the right one."""
        return fit.apart < FILLED or (self.masked is not None and self.masked.likely(self.signal, fit))

    def run(self, usual: UsualRows, starts: int, shorter: Fit | None = None) -> Fit:
        """Return the best sentence found.

        Args:
            usual: what rows are like among usual words.
            shorter: a guess one word shorter, which is tried with a word more before all others.
            starts: guesses that are mended until one fits: from usual words around, others each time, and from the best
                guess with places redrawn, in turn. Where it is one, what seldom helps is not tried: of a batch most
                lengths are wrong, and nothing mends a guess for these.
        """
        best: Fit | None = None
        thorough = starts > 1
        if shorter is not None and len(self.bag):
            best = self._mended(self._best(self._longer(shorter)), usual.places[self.places], thorough)
            if self.whole(best):
                return best
        for start in range(starts):
            if start % 2 == 0 and start:
                usual = usual_rows(self.model, self.signal, self.words, self.length, self.rng)
            added = usual.places[self.places]
            likely = self._shares_of_all(added, usual.framing, [None] * len(self.places))
            if best is None or start % 2 == 0:
                shown = max(_SHORTEST, min(_SHORT, _ROWS // len(self.places)))
                words = _most(likely, min(shown, self.possible))
                # word by word what fills most of what is left
                first = self._pick(words, self.words.rows[words] + added[:, None], usual.framing)
            else:
                first = self._redrawn(best, likely)
            found = self._mended(self._best([first]), added, thorough)
            if best is None or found.apart < best.apart:
                best = found
            if self.whole(best):
                break
        assert best is not None
        return best

    # a first guess

    def _pick(self, words: Tensor, rows: Tensor, framing: Tensor) -> Tensor:
        """Return [n] tokens, chosen one after the other, the surest first, of [P, K] words with rows [P, K, d]."""
        remaining = Remaining(self.signal, rows, framing)
        picked = words[:, 0].clone()
        left = torch.ones(len(words), dtype=torch.bool, device=words.device)
        while bool(left.any()):
            best = remaining.share.max(1)
            at = int(torch.where(left, best.values, -1.0).argmax())
            word = int(best.indices[at])
            picked[at], left[at] = words[at, word], False
            remaining.choose(rows[at, word])
        return framed(self.model, picked.tolist())

    def _longer(self, shorter: Fit) -> list[Tensor]:
        """Return a guess with each word of the batch put at each place of it."""
        before, behind = len(self.model.special.prefix), len(self.model.special.suffix)
        tokens = shorter.tokens
        places = range(before, len(tokens) - behind + 1)
        return [torch.cat([tokens[:at], word[None], tokens[at:]]) for at in places for word in self.bag]

    def _redrawn(self, best: Fit, shares: Tensor) -> Tensor:
        """Put likely words at some places of a guess, which lead elsewhere."""
        tokens = best.tokens.clone()
        likely = _most(shares, min(_TRIED, self.possible))
        many = max(2, round(_REDRAWN * len(self.places)))
        for at in torch.randperm(len(self.places), generator=self.rng)[:many].tolist():
            tokens[self.places[at]] = likely[at, int(torch.randint(likely.shape[1], (1,), generator=self.rng))]
        return tokens

    # mending

    def _mended(self, now: Fit, shifts: Tensor, thorough: bool = True) -> Fit:
        """Exchange and move words until the space is filled or nothing fills more of it."""
        for turn in range(_TURNS):
            step("one matrix: turns of exchange", turn, _TURNS)
            if now.apart < FILLED:
                break
            own = rows_of(self.model, self.signal, now.tokens[None])[0]
            words, rows = self._tried(now, own, shifts, _TRIED)
            shifts = (rows - self.words.rows[words]).mean(1)
            picked = self._pick(words, rows, own[self.framing])
            fits = [self._shares(own, rows), self.signal.within(rows)]  # the latter as if the words around were right
            best = self._best([picked, *(self._others_kept(now, words, fit) for fit in fits)])
            if best.apart > now.apart - FILLED:
                best = self._best(self._neighbors(now, words, fits))
            if best.apart > now.apart - FILLED and thorough:
                best = self._best([now.tokens, *self._rearranged(now, own)])  # a single word has no other place
            if best.apart > now.apart - FILLED and thorough:
                best = self._widened(now, own, shifts)
            if best.apart > now.apart - FILLED:
                break
            now = best
        return now

    def _tried(
        self, now: Fit, own: Tensor, shifts: Tensor, many: int, among: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return likely words and the guess's own at each place, [P, K], and their rows among the guess's words."""
        at = list(range(len(self.places)) if among is None else among)
        places = torch.tensor([self.places[p] for p in at], device=own.device)
        likely = _most(self._shares_of_all(shifts[at], own, (places - self.first).tolist()), min(many, self.possible))
        bag = torch.unique(torch.cat([now.tokens[self.places], self.bag, self.usual]))
        words = torch.cat([bag.expand(len(at), -1), likely], 1)
        return words, rows_among(self.model, self.signal, now.tokens, places, words)

    def _widened(self, now: Fit, own: Tensor, shifts: Tensor) -> Fit:
        """Try many words at the places whose words fit worst, and then every word where the others are nearly right."""
        worst = self._worst(own)
        best = self._best([now.tokens, *(one for at in worst for one in self._exchanged(now, own, shifts, at, _WIDE))])
        nearly = now.apart < _NEARLY * len(self.places) and not self.whole(now)
        for at in worst if nearly else ():
            if best.apart < now.apart - FILLED:
                break
            best = self._best([now.tokens, *self._exchanged(now, own, shifts, at, len(self.words.rows))])
        return best

    def _exchanged(self, now: Fit, own: Tensor, shifts: Tensor, at: int, many: int) -> list[Tensor]:
        """Return the guess with the best of many likely words at a place."""
        words, rows = self._tried(now, own, shifts, many, [at])
        others = _without(own, self.places[at] - self.first)
        found = []
        for word in words[0, _most(shares(self.signal, rows[0], others), _SWAPPED)]:
            exchanged = now.tokens.clone()
            exchanged[self.places[at]] = word
            found.append(exchanged)
        return found

    def _worst(self, own: Tensor) -> list[int]:
        """Return which places' words fit worst beside the others."""
        fits = [shares(self.signal, own[p - self.first], _without(own, p - self.first)) for p in self.places]
        return torch.stack(fits).argsort()[:_WORST].tolist()

    def _rearranged(self, now: Fit, own: Tensor) -> list[Tensor]:
        """Return the guess with two neighboring parts swapped, or with a bad word left out and another put in."""
        words = now.tokens[self.places].tolist()
        count = len(words)
        found = [
            [*words[:a], *words[b:c], *words[a:b], *words[c:]]
            for a, b, c in itertools.combinations(range(count + 1), 3)
        ]
        for at in self._worst(own):
            rest = words[:at] + words[at + 1 :]
            others = dict.fromkeys([*words, *self.usual.tolist()])
            found += [[*rest[:to], word, *rest[to:]] for word in others for to in range(count) if to != at]
        chosen = torch.randperm(len(found), generator=self.rng)[: max(1, _REARRANGED // self.length)]
        return [framed(self.model, found[n]) for n in chosen.tolist()]

    def _shares_of_all(self, shifts: Tensor, own: Tensor, without: Sequence[int | None]) -> Tensor:
        found = self.words.shares(self.signal, shifts, own, without)
        found[:, self.barred] = -1.0
        return found

    def _shares(self, own: Tensor, rows: Tensor) -> Tensor:
        """Return [P, K], what each tried word would fill beside the guess's other words."""
        others = [_without(own, place - self.first) for place in self.places]
        return torch.stack([shares(self.signal, row, other) for row, other in zip(rows, others, strict=True)])

    def _others_kept(self, now: Fit, words: Tensor, fits: Tensor) -> Tensor:
        """Return the guess with the best word at each place, as if the others were right."""
        tokens = now.tokens.clone()
        tokens[self.places] = words.gather(1, fits.argmax(1, keepdim=True))[:, 0]
        return tokens

    def _neighbors(self, now: Fit, words: Tensor, fits: Sequence[Tensor]) -> list[Tensor]:
        """Return the guess with two words swapped, one moved, or one exchanged."""
        found = []
        likely = torch.cat([words.gather(1, _most(fit, _SWAPPED)) for fit in fits], 1)
        for a, one in enumerate(self.places):
            for b, other in enumerate(self.places):
                if a < b and now.tokens[one] != now.tokens[other]:
                    swapped = now.tokens.clone()
                    swapped[[one, other]] = now.tokens[[other, one]]
                    found.append(swapped)
                if abs(a - b) > 1:
                    moved = now.tokens[self.places].tolist()
                    moved.insert(b, moved.pop(a))
                    found.append(framed(self.model, moved))
            for word in likely[a]:
                if word != now.tokens[one]:
                    exchanged = now.tokens.clone()
                    exchanged[one] = word
                    found.append(exchanged)
        return found

    def _best(self, sentences: Sequence[Tensor]) -> Fit:
        every = torch.stack(list(sentences))
        parts = torch.split(every, 128)
        apart = torch.cat([self.signal.apart(rows_of(self.model, self.signal, part)) for part in parts])
        at = int(apart.argmin())
        return Fit(every[at], float(apart[at]))


def barred_words(model: TextModel, among: Tensor | None) -> Tensor:
    """Return the token ids [n] that no sentence holds: special ones, and all but some [m] where these are known."""
    held = torch.ones(model.vocabulary_size, dtype=torch.bool, device=model.device)
    if among is not None:
        held = torch.zeros_like(held)
        held[among] = True
    held[sorted(model.special.ids)] = False
    return torch.where(~held)[0]


def _without(rows: Tensor, at: int) -> Tensor:
    return torch.cat([rows[:at], rows[at + 1 :]])


def _most(shares: Tensor, many: int) -> Tensor:
    """Return where the largest shares [..., n] are, so many or all, [..., m]."""
    return shares.topk(min(many, shares.shape[-1])).indices
