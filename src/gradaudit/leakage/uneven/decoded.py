"""The rows of a batch from entries that are known unevenly: fit, decode, judge, and fit again with what was decoded."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gradaudit.leakage.decoding.rows import EXPECTED_OFF, MaskedInputs, Row, Search, find_rows, look_harder
from gradaudit.leakage.decoding.whole_rows import whole_rows
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.leakage.uneven.decoded_change import DecodedChange
from gradaudit.leakage.uneven.entries import Entries
from gradaudit.leakage.uneven.exact_rows import (
    FINE,
    Explanation,
    Masked,
    astray,
    explain,
    mended,
    other_tokens,
    pulls,
)
from gradaudit.leakage.uneven.low_rank import FLOORS, LARGEST_SHARE, NEAR, Fitting, LowRank, started
from gradaudit.leakage.uneven.overlooked import Candidate, overlooked
from gradaudit.models.base import TextModel
from gradaudit.progress import step

_ROUNDS = 8
"""Fits with what the one before decoded."""
_OFF = (EXPECTED_OFF, 3.0, 4.5)
"""How far off a row may lie, in its expected distance, round by round: beside rows that are held fixed the true ones
that are missing come to lie at 2.5 to 3.5, nearest of all tokens, and a wrong one is dropped again."""
_CROWDED, _CROWDED_OFF = 0.5, 1.6
"""Beyond this share of the width wrong rows come into reach, under masks that leave less than dropout can; and how far
off a row may then lie at first: true ones lie at 0.8 to 1.4, wrong ones from 1.9 (MiniLM, 196 tokens, 215 directions of
384). Below it, where entries are known badly, true rows lose bits by chance and lie further off."""
_COARSE = FLOORS[-2:]
"""Floors at which rows are judged while some are missing."""
_DOUBT = 0.8
"""What is left goes with a row where it comes back to the lines as alike as this (fp16, four sentences: 0.90, that of
the next row 0.59)."""
_STRAY, _FEW = 16, 40
"""Directions that stand out of what the rows leave are rows that are missing (measured: 0 or 1 where none is, 2 with 48
of 50 found, 286 with 46), or wrong bits of rows that are there: so many at most. Fewer rows than the second number are
held against everything at once, and listened for whatever stands out: that costs less than another fit (MiniLM, 1e-5:
without its first token, the loudest, 23 of 24 rows leave 55)."""
_SURE = 0.6
"""Of the rows that may be missing so many are taken in one round, nearest first."""
_EFFORT, _MOST_EFFORT, _MOST_IN_VAIN = 3, 3, 2
"""Tries at copies of what was found, in times the first ones, and how often anew where a round finds nothing; and where
none has found anything."""
_MIDDLE = (0.03, 0.01, 1e-3)
"""Floors at which masks are mended before the next fit."""
_WRONG, _WORST = 6.0, 0.3
"""A row whose pull is so many times the median one is wrong, with those that pull at least so much as the worst."""
_LOUD = 0.3
"""Words that explain this share of what the best one does are taken with it: others are its likenesses."""
_IDLE = 3.0
"""A row whose signals each explain less than so many squared errors is none: chance makes 1, the weakest true row of
116 19 (MiniLM, 1e-5)."""


class _Decoding:
    """Rows of a weight change in the making.

    Args:
        model: the model.
        seen: entries of its block 0.
        how: how far to look.
        rng: for tries and for the draws of errors.
    """

    def __init__(self, model: TextModel, seen: Entries, how: Search, rng: torch.Generator) -> None:
        self.model, self.how, self.rng = model, how, rng
        self.fitting = Fitting(seen, rng)
        self.most = int(LARGEST_SHARE * model.width)
        self.rows: list[Row] = []
        self.doubted = set[tuple[int, int]]()
        self.held = 0
        self.missing = model.width

    @property
    def whole(self) -> bool:
        """Say whether no row was masked."""
        return self.how.rate == 0

    def fit(self, inputs: MaskedInputs | None, beyond: int) -> LowRank | None:
        """Return the low rank, with the rows found so far held fixed; see `Fitting.fit` for `beyond`."""
        self.held = len(self.rows)
        if inputs is None or not self.rows:
            fitting = Fitting(self.fitting.seen.unread(), self.rng)
            return fitting.fit(self.most, first=started(self.how.size), beyond=beyond)
        return self.fitting.fit(self.most, self.masked(inputs).rows(), first=0, beyond=beyond)

    def masked(self, inputs: MaskedInputs, others: Tensor | None = None) -> Masked:
        """Return the rows with their masks, and directions beside them."""
        clean, kept = torch.stack([row.clean for row in self.rows]), torch.stack([row.kept for row in self.rows])
        return Masked(inputs, clean, kept, self.how.rate, clean[:0] if others is None else others, self.fitting.columns)

    def look(self, inputs: MaskedInputs, fit: LowRank, effort: int) -> None:
        """Find rows in the span, with so many times the tries at what was missed."""
        for turn in range(effort + 1):
            before, missing = self.rows, self.missing
            if self.whole:
                self.rows = whole_rows(inputs, self.how, self.rows)
            elif turn:
                self.rows = look_harder(inputs, self.how, self.rows, _EFFORT, self.rng)
            else:
                self.rows = find_rows(inputs, self.how, self.rng, self.rows)
            if len(self.rows) > len(before):
                self.choose(inputs, len(before))
                self.drop(inputs, fit)
                self.count(inputs, fit.signals(self.beside(inputs, fit).rows())[:, : len(self.rows)])
                if before and self.missing >= missing:
                    # read wrongly: they explain nothing, as the first rows may where the loudest is not among them
                    self.rows, self.missing = before, missing
            elif turn:
                break
            if self.missing == 0 or len(self.rows) >= inputs.span.rank or self.whole:
                break

    def choose(self, inputs: MaskedInputs, known: int) -> None:
        """Keep of the rows behind those known the nearest to the span: no more than may be missing, and no shadows.

        The same token a position further on, under the same mask, is nearly the same row: of such two the one nearer
        to the span was sent. Beside rows that are held fixed, several new ones of one token at one position are mostly
        one row that was read differently. More rows than directions are wrong ones in part, which lie further off.
        """
        rank, entering = inputs.span.rank, self.masked(inputs).entering()
        most = _SURE * (self.missing if len(self.rows) <= rank else rank - known)
        far = (inputs.span.residual(entering) / inputs.span.expected(entering).clamp_min(NEAR)).tolist()
        chosen: list[int] = []
        places: list[tuple[int, int]] = []
        for at in sorted(range(len(far)), key=lambda at: (at >= known, far[at])):
            row, new = self.rows[at], at >= known
            place = (row.token, row.position)
            alike = [one for one in map(self.rows.__getitem__, chosen) if one.token == row.token]
            shadow = not self.whole and any(
                one.position != row.position and not inputs.differ(row.clean, row.kept, one.kept) for one in alike
            )
            if shadow or (new and (len(places) >= most or (self.held and place in places))):
                continue
            chosen.append(at)
            places += [place] * new
        self.rows = [self.rows[at] for at in sorted(chosen)]

    def count(self, inputs: MaskedInputs, left: Tensor | None) -> None:
        """Count the directions that stand out of what the rows leave, with signals [n, f] to start from, or none."""
        step("decode: rows", len(self.rows), inputs.span.rank)
        rows = self.masked(inputs).rows()
        self.missing = self.fitting.missing(self.fitting.signals(rows, _COARSE[-1], left), rows, _COARSE[-1])

    def complete(self) -> bool:
        """Say whether the rows make whole sentences: at each position as many as before it, less those that ended."""
        ending = self.model.special.suffix[-1:]
        here = Counter(row.position for row in self.rows)
        ended = Counter(row.position for row in self.rows if (row.token,) == ending)
        held = all(here[place + 1] == here[place] - ended[place] for place in range(len(here)))
        return not self.whole and held and here[0] == self.how.size

    def listen(self, inputs: MaskedInputs) -> None:
        """Add rows that must be there, or that what is left speaks for, as long as that makes fewer missing."""
        while 0 < self.missing < self.model.width and (self.missing <= _STRAY or len(self.rows) < _FEW):
            if not self.tried(inputs, self.owed()) and not self.tried(inputs, self.loud(inputs)):
                return

    def owed(self) -> list[Candidate]:
        """Return the tokens that every sentence begins with, where fewer are known than there are sentences.

        A copy's own part beside those known is the pattern of its mask alone, which no clean row is like.
        """
        known = Counter((row.token, row.position) for row in self.rows)
        first = [(token, place) for place, token in enumerate(self.model.special.prefix)]
        short = 0 if self.whole else self.sentences()
        return [Candidate(math.inf, token, place) for token, place in first if known[token, place] < short]

    def loud(self, inputs: MaskedInputs) -> list[Candidate]:
        """Return the words that explain most of what is left; see `overlooked`."""
        never = self.model.special.ids - {*self.model.special.prefix, *self.model.special.suffix}
        ids = torch.tensor([t for t in range(self.model.vocabulary_size) if t not in never]).to(inputs.basis.device)
        masked = self.masked(inputs)
        left = self.fitting.signals(masked.rows(), _COARSE[-1])
        last = max(row.position for row in self.rows) + 1 if self.model.absolute_positions else 0
        places = range(min(last + 1, self.how.max_length, self.model.max_length))
        heard = overlooked(self.fitting, masked, left, _COARSE[-1], places, ids)
        return [one for one in heard if one.gain > max(_IDLE, _LOUD * heard[0].gain)][: self.missing]

    def tried(self, inputs: MaskedInputs, more: Sequence[Candidate]) -> bool:
        """Add rows where that makes fewer missing, and say whether it does."""
        if not more:
            return False
        before, missing = self.rows, self.missing
        copies = 1 if self.whole or len(more) > 1 else self.copies(more)
        known = {(row.token, row.position) for row in before}
        drawn = [
            self.drawn(inputs, one, copies > 1 or (one.token, one.position) in known)
            for one in more
            for _ in range(copies)
        ]
        self.rows = [*before, *drawn][: self.most]
        kept, left = self.mended(self.masked(inputs), _COARSE)
        self.keep(kept)
        self.count(inputs, left if len(self.rows) == len(kept) else None)
        if self.missing < missing:
            return True
        self.rows, self.missing = before, missing
        return False

    def copies(self, loud: Sequence[Candidate]) -> int:
        """Return how many rows more may be the one word's that is heard."""
        known = sum((row.token, row.position) == (one.token, one.position) for one in loud for row in self.rows)
        return max(1, min(self.missing, self.sentences() - known))

    def sentences(self) -> int:
        """Return how many sentences there are: where nobody knows, the least, as many as have rows at one position."""
        return self.how.size or max(Counter(row.position for row in self.rows).values(), default=0)

    def drawn(self, inputs: MaskedInputs, one: Candidate, masked: bool) -> Row:
        """Return a candidate's row, under a mask drawn at random where it must differ from its copies."""
        clean = inputs.clean(one.position, torch.tensor([one.token], device=inputs.basis.device))[0]
        kept = torch.rand(clean.shape, generator=self.rng) >= self.how.rate * masked
        return Row(one.token, one.position, kept.to(clean.device), clean)

    def beside(self, inputs: MaskedInputs, fit: LowRank) -> Masked:
        """Return the rows, and beside them the directions of the span that they leave."""
        inside = self.masked(inputs).entering() * fit.scale @ fit.basis
        left = torch.linalg.svd(inside, full_matrices=True).Vh[len(inside) :] @ (fit.basis.T / fit.scale)
        return self.masked(inputs, left / self.fitting.columns)

    def drop(self, inputs: MaskedInputs, fit: LowRank) -> None:
        """Drop the rows that the entries speak against."""
        masked = self.beside(inputs, fit)
        start = fit.signals(masked.rows())
        pull = pulls(self.fitting, masked, _COARSE[-1], start)
        wrong = (pull > _WRONG * pull.median()) & (pull > _WORST * pull.max()) & (pull > 1)
        self.rows = [row for row, bad in zip(self.rows, wrong.tolist(), strict=True) if not bad]

    def keep(self, masks: Tensor) -> None:
        """Give the rows their mended masks; of those that were one row read twice the first stays."""
        rows = {
            (row.token, row.position, tuple(mask.tolist())): replace(row, kept=mask)
            for row, mask in reversed(list(zip(self.rows, masks, strict=True)))
        }
        self.rows = list(reversed(rows.values()))

    def mended(self, masked: Masked, floors: tuple[float, ...], left: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the masks with the bits exchanged that explain the entries better, and the signals; see `mended`."""
        if not self.whole:
            return mended(self.fitting, masked, floors, left)
        for floor in floors:
            left = self.fitting.signals(masked.rows(), floor, left)
        assert left is not None
        return masked.kept, left

    def explained(self, inputs: MaskedInputs) -> Explanation | None:
        """Return what the rows explain with masks mended to the last bit, which they keep; None where some miss."""
        masked = self.masked(inputs)
        kept, left = self.mended(masked, _COARSE)
        masked = replace(masked, kept=kept)
        missing = self.fitting.missing(left, masked.rows(), _COARSE[-1])
        if missing > _STRAY:
            return None
        kept, left = self.mended(masked, FINE[1:], left)
        self.missing = self.fitting.missing(left, replace(masked, kept=kept).rows(), _COARSE[-1], scaled=True)
        count = len(self.rows)
        self.keep(kept)
        told = self.told(inputs, left if len(self.rows) == count else None)
        if bool((idle := told.own < _IDLE).any()):
            self.rows = [row for row, none in zip(self.rows, idle.tolist(), strict=True) if not none]
            if not self.rows:
                return None
            told = self.told(inputs, told.left[:, ~idle] / self.fitting.lines)
        return told

    def doubt(self, inputs: MaskedInputs, told: Explanation) -> None:
        """Put the row back, once, that what is left goes with: all words are there, and its mask was read wrongly.

        It is read again from a direction that is known far better beside the others, held fixed.
        """
        at, likeness = astray(self.fitting, self.masked(inputs).rows(), told.left / self.fitting.lines)
        row = self.rows[at]
        if likeness > _DOUBT and (row.token, row.position) not in self.doubted:
            self.doubted.add((row.token, row.position))
            self.rows = [*self.rows[:at], *self.rows[at + 1 :]]

    def ends(self, told: Explanation, stays: bool) -> bool:
        """Say whether what is left is nothing that a row could explain.

        Args:
            told: what the rows explain.
            stays: the last round found no row.
        """
        if told.whole:
            return told.sharp or stays or self.missing == 0
        return stays and self.missing == 0

    def told(self, inputs: MaskedInputs, left: Tensor | None = None) -> Explanation:
        """Return what the rows explain as they are."""
        masked = self.masked(inputs)
        others = partial(other_tokens, masked, [row.position for row in self.rows])
        return explain(self.fitting, masked, others, self.rng, left)


def decode_change(model: TextModel, seen: Entries, how: Search, rng: torch.Generator) -> DecodedChange | None:
    """Return the rows of block 0 behind a weight change; None where no low rank shows.

    Args:
        model: the model.
        seen: entries of its block 0.
        how: how far to look.
        rng: for tries and for the draws of errors.
    """
    state = _Decoding(model, seen, how, rng)
    inputs: MaskedInputs | None = None
    told: Explanation | None = None
    fit: LowRank | None = None
    best: tuple[Explanation, MaskedInputs, list[Row]] | None = None
    effort = 1
    for turn in range(_ROUNDS):
        if (new := state.fit(inputs, effort)) is None:
            break
        fit = new
        span = fit.span(0)
        crowded = fit.rank > _CROWDED * model.width
        off = _CROWDED_OFF if crowded and turn == 0 else _OFF[min(turn, len(_OFF) - 1)]
        least = how.least if crowded else Search.least
        inputs = MaskedInputs(model, span, NEAR, seen.rounded, seen.weights, off, least)
        before = len(state.rows)
        state.look(inputs, fit, effort)
        stays, complete = len(state.rows) == before, state.complete()
        if state.rows and (stays or (not complete and len(state.rows) < _FEW)):
            state.listen(inputs)
            stays = len(state.rows) == before
        if not (stays and told is not None):
            few = state.missing <= _STRAY and (stays or complete or len(state.rows) < _FEW)
            worth = state.missing == 0 or few
            told = state.explained(inputs) if worth and state.rows else None
        if told is not None and state.ends(told, stays):
            break
        if told is not None and complete and not told.whole:
            if best is None or told.chi2 < best[0].chi2:
                best = told, inputs, list(state.rows)
            state.doubt(inputs, told)
        effort += stays
        if effort > (_MOST_EFFORT if state.rows else _MOST_IN_VAIN):
            break
        if 0 < len(state.rows) < _FEW and (told is None or not told.whole):
            state.keep(state.mended(state.beside(inputs, fit), _MIDDLE)[0])
            told = None
    if best is not None and (told is None or told.chi2 >= best[0].chi2):
        # these make whole sentences, so that none is missing, and what was read beside them made it worse
        told, inputs, state.rows = best
        state.missing = 0
    if inputs is None or fit is None or not state.rows:
        return None
    if told is None:
        state.keep(state.mended(state.beside(inputs, fit), _MIDDLE)[0])
    entering = state.masked(inputs).entering()
    if told is None or told.left.shape[1] != len(entering):
        told = state.told(inputs)
    if told.whole:
        basis = torch.linalg.qr(entering.T).Q
        exact = Span(basis, torch.ones_like(basis[0]), len(entering), 1.0, 0, ())
        inputs = MaskedInputs(model, exact, rounded=seen.rounded, weights=seen.weights)
    rank = len(entering) if told.whole else len(entering) + state.missing
    return DecodedChange(state.rows, inputs, told, entering, rank)
