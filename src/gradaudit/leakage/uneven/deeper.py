"""A decoder's sentences held against its second block, where a row tells all that stands before its word.

In the first block of a rotary model a word has one row wherever it stands; what came back to words of many places is
the sum of their pasts, and may be told wrongly. In the second block every prefix has a row of its own. Prefixes grow
by words that lie in the low rank of its entries and explain what all others leave, the loudest first. Each row is known
exactly, and with all of them held fixed nothing comes back to wrong ones: they go out. Where too many entries are
bounds for a fit of low rank (SmolLM2, four sentences at 1e-5: 87%) the prefixes found in the first block are held.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.prefixes import last_inputs
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.leakage.uneven.entries import Entries
from gradaudit.leakage.uneven.exact_rows import APART, EXPLAINED, FINE, Explanation, explain
from gradaudit.leakage.uneven.low_rank import FLOORS, Fitting
from gradaudit.leakage.uneven.overlooked import loudest
from gradaudit.models.base import TextModel
from gradaudit.progress import step

BLOCK = 1
"""The block whose rows are held against the update."""
_OFF, _NEAR = 4.0, 5e-3
"""A row may be so many times as far off the low rank as the errors of its directions make it, or as this distance
(SmolLM2, 5e-5, 40 words: right ones at most 3.1, wrong ones from 1.1, half of them beyond 4.5)."""
_LARGEST_SHARE = 0.8
"""Largest rank tried, as a share of the width."""
_IDLE = 3.0
"""A row whose signals each explain less than so many squared errors is none: chance makes 1."""
_LOUD = 0.9
"""Words that explain this share of what the best one does are taken with it, each behind one prefix: behind others the
same word's row is nearly the same."""
_SPARE = 1.1
"""Prefixes that may be held, times the rank: of 35 to 50 right ones the fit showed all but 3 (SmolLM2, 5e-5)."""
_TOGETHER = 1024
"""Texts whose rows are made together: bounds memory."""

Text = tuple[int, ...]
"""Token ids, first to last."""


@dataclass(frozen=True)
class HeldRows:
    """Rows that are known exactly, in units of the columns."""

    exact: Tensor

    @property
    def others(self) -> Tensor:
        """Return no directions: every row is known."""
        return self.exact[:0]

    def rows(self) -> Tensor:
        """Return the rows."""
        return self.exact

    def moves(self) -> Tensor:
        """Return zeros: nothing was masked."""
        return torch.zeros_like(self.exact)


@dataclass(frozen=True)
class Deeper:
    """What a deeper block says.

    Args:
        sentences: prefixes that nothing follows.
        proven: of each, whether all is explained, a further word would show, and no other word, nor the same behind
            another prefix, would do.
        chi2: what they leave of the entries, per degree of freedom.
    """

    sentences: list[Text]
    proven: list[bool]
    chi2: float


class _Prefixes:
    """Texts whose last words' rows are held to be those of the batch.

    Args:
        model: a decoder.
        seen: entries of its block.
        words: token ids that the batch is made of.
        rng: draws errors.
    """

    def __init__(self, model: TextModel, seen: Entries, words: Sequence[int], rng: torch.Generator) -> None:
        self.model, self.words, self.rng = model, sorted(set(words)), rng
        self.fitting = Fitting(seen, rng)
        self._made: dict[Text, Tensor] = {}

    def made(self, texts: Sequence[Text]) -> Tensor:
        """Return what enters the block at the last word of each text, in units of the columns."""
        new = [text for text in texts if text not in self._made]
        for length in {len(text) for text in new}:
            here = [text for text in new if len(text) == length]
            for at in range(0, len(here), _TOGETHER):
                some = here[at : at + _TOGETHER]
                ids = torch.tensor(some, device=self.fitting.columns.device)
                rows = last_inputs(self.model, BLOCK, ids).to(self.fitting.columns) / self.fitting.columns
                self._made |= dict(zip(some, rows, strict=True))
        return torch.stack([self._made[text] for text in texts])

    def span(self, first: int) -> Span | None:
        """Return the low rank of the entries; None where none shows.

        Args:
            first: directions to start from.
        """
        fit = self.fitting.fit(int(_LARGEST_SHARE * self.model.width), first=first, beyond=1)
        if fit is None:
            return None
        return Span(fit.basis, torch.ones_like(fit.lost), fit.rank, 1.0, BLOCK, (), fit.lost, fit.scale)

    def others(self, texts: Sequence[Text]) -> list[Text]:
        """Return every word behind every text, and as a first one, where it is none of them."""
        taken = set(texts)
        return [text for before in [(), *texts] for w in self.words if (text := (*before, w)) not in taken]

    def within(self, texts: Sequence[Text], span: Span) -> list[Text]:
        """Return the texts whose rows lie in the low rank as far as its errors allow."""
        rows = self.made(texts) * self.fitting.columns
        off = span.residual(rows) / span.expected(rows).clamp_min(_NEAR)
        return [text for text, far in zip(texts, off.tolist(), strict=True) if far < _OFF]

    def grown(self, texts: Sequence[Text], span: Span, most: int) -> list[Text]:
        """Return texts and those behind them that explain what they leave, the loudest first.

        Args:
            texts: held from the start, at least one.
            span: low rank of the entries.
            most: texts held at most.
        """
        texts, rows = list(texts), self.made(texts)
        left: Tensor | None = None
        while len(texts) <= most and (more := self.within(self.others(texts), span)):
            left = self.fitting.freed(rows, FLOORS[-1], self.fitting.signals(rows, FLOORS[-1], left))
            chosen: dict[int, Text] = {}
            heard = loudest(self.fitting, rows, left, FLOORS[-1], torch.split(self.made(more), _TOGETHER))
            for gain, at in heard:
                if gain > max(_IDLE, _LOUD * heard[0][0]):
                    chosen.setdefault(more[at][-1], more[at])
            if not chosen:
                break
            texts += chosen.values()
            rows = self.made(texts)
            left = torch.nn.functional.pad(left, (0, len(chosen)))
            step(f"decode: {len(texts)} prefixes in block {BLOCK}", len(texts))
        return texts

    def explained(self, texts: Sequence[Text]) -> tuple[list[Text], Explanation]:
        """Return the texts and all that they begin with, without ends that explain nothing, and what they explain."""
        texts = sorted({text[:n] for text in texts for n in range(1, len(text) + 1)})
        rows = self.made(texts)
        left: Tensor | None = None
        while True:
            for floor in FINE[:-1]:
                left = self.fitting.signals(rows, floor, left)
            told = explain(self.fitting, HeldRows(rows), partial(self.apart, texts), self.rng, left)
            ends = set(ends_of(texts))
            idle = [text in ends and own < _IDLE for text, own in zip(texts, told.own.tolist(), strict=True)]
            stay = [n for n, none in enumerate(idle) if not none]
            if len(stay) in (0, len(texts)):
                return texts, told
            texts, rows = [texts[n] for n in stay], rows[stay]
            left = told.left[:, stay] / self.fitting.lines

    def apart(self, texts: Sequence[Text], energy: Tensor) -> Tensor:
        """Return [f] the least growth of chi^2 by another word, or the same behind another prefix, in each one's place.

        Args:
            texts: those that are held.
            energy: [f, d] growth of chi^2 by a square of the coordinate.
        """
        rows = self.made(texts)
        least = torch.full_like(energy[:, 0], torch.inf)
        own = (energy * rows.square()).sum(1, keepdim=True)
        for other in torch.split(self.made(self.others(texts)), _TOGETHER):
            grown = energy @ other.square().T - 2 * (energy * rows) @ other.T + own
            least = torch.minimum(least, grown.min(1).values)
        return least


def ends_of(texts: Sequence[Text]) -> list[Text]:
    """Return the texts that no other goes on."""
    inner = {text[:-1] for text in texts}
    return [text for text in texts if text not in inner]


def held_deeper(
    model: TextModel, seen: Entries, start: Sequence[Text], words: Sequence[int], size: int, rng: torch.Generator
) -> Deeper | None:
    """Return the sentences that explain a deeper block's entries, beginning with those found in the first.

    None where that takes more prefixes than the entries have directions: of many wrong ones some explain anything.

    Args:
        model: a decoder.
        seen: entries of its block `BLOCK`.
        start: prefixes, at least one.
        words: token ids that the batch is made of.
        size: directions to start from.
        rng: draws errors.
    """
    held = _Prefixes(model, seen, words, rng)
    start = sorted({text[:n] for text in start for n in range(1, len(text) + 1)})
    span = held.span(size)
    most = len(start) if span is None else max(len(start), int(_SPARE * span.rank))
    texts, told = held.explained(start if span is None else held.grown(start, span, most))
    if len(texts) > most:
        return None
    sure = dict(zip(texts, (told.apart > APART).tolist(), strict=True))
    found = ends_of(texts)
    whole = told.chi2 < EXPLAINED and told.sharp
    proven = [whole and all(sure[text[:n]] for n in range(1, len(text) + 1)) for text in found]
    return Deeper(found, proven, told.chi2)
