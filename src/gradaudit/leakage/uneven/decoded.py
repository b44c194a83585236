"""The rows of a batch from entries that are known unevenly: fit, decode, judge, and fit again with what was decoded."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradaudit.leakage.decoding.rows import MaskedInputs, Row, Search, find_rows, look_harder
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.leakage.uneven.entries import Entries
from gradaudit.leakage.uneven.exact_rows import FINE, Explanation, Masked, explain, mended, pulls
from gradaudit.leakage.uneven.low_rank import FLOORS, Fitting, LowRank
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import Observation

_ROUNDS = 8
"""Fits with what the one before decoded."""
_LARGEST_SHARE = 0.8
"""Largest rank tried, as a share of the width."""
_PER_SENTENCE = 5
"""Directions to start from, a sentence: few sentences are shorter."""
_NEAR = 5e-3
"""A row this near the span is looked at, whatever the fit's own error: rows held fixed have wrong bits of small
coordinates, which put others off by up to 2e-3."""
_COARSE = FLOORS[-2:]
"""Floors at which rows are judged while some are missing."""
_STRAY = 16
"""Where rows are missing more directions than this stand out (measured: 138 to 384); wrong bits make some, too."""
_NEARLY = 0.5
"""With so many of the directions decoded the others may be the fit's own."""
_FEW = 40
"""So few rows are held against everything whatever the rank."""
_EFFORT, _MOST_EFFORT = 3, 3
"""Tries at copies of what was found, in times the first ones, and how often anew where a round finds nothing."""
_SLOW, _BEYOND = 0.1, 0.12
"""Where a round finds less than this share of new rows, this share of directions is added to those that show: with a
gradient seen through 1e-5 13 of 116 did not (MiniLM, 8 sentences)."""
_MIDDLE = (0.03, 0.01, 1e-3)
_WRONG, _WORST = 6.0, 0.3
"""A row whose pull is so many times the median one is wrong, with those that pull at least so much as the worst."""


@dataclass(frozen=True)
class DecodedChange:
    """Rows decoded from a weight change.

    Args:
        rows: the rows.
        inputs: what dropout masks, and the span: of the rows themselves where they explain everything.
        told: what they explain.
        entering: [r, d] the rows as they enter.
    """

    rows: list[Row]
    inputs: MaskedInputs
    told: Explanation
    entering: Tensor

    def gradient(self, seen: Observation, entries: Entries, drawn: bool = False) -> Observation:
        """Return the observation with the gradient that these rows and signals make in place of the weight change.

        Args:
            seen: the observation.
            entries: of its block 0.
            drawn: add the draw of the error.
        """
        signals = self.told.left + self.told.noise if drawn else self.told.left
        return replace(seen, kind="gradient", tensors=entries.parts(signals @ self.entering))


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
        self.most = int(_LARGEST_SHARE * model.width)
        self.rows: list[Row] = []

    def fit(self, inputs: MaskedInputs | None, beyond: int) -> LowRank | None:
        """Return the low rank, with the rows found so far held fixed, and so many directions beyond it."""
        if inputs is None or not self.rows:
            first = _PER_SENTENCE * (self.how.size or 1) + 1
            return Fitting(self.fitting.seen.unread(), self.rng).fit(self.most, first=first, beyond=beyond)
        return self.fitting.fit(self.most, self.masked(inputs).rows(), first=0, beyond=beyond)

    def masked(self, inputs: MaskedInputs, others: Tensor | None = None) -> Masked:
        """Return the rows with their masks, and directions beside them."""
        clean, kept = torch.stack([row.clean for row in self.rows]), torch.stack([row.kept for row in self.rows])
        return Masked(inputs, clean, kept, self.how.rate, clean[:0] if others is None else others)

    def look(self, inputs: MaskedInputs, effort: int) -> None:
        """Find rows in the span, with so many times the tries at what was missed (0: not anew)."""
        self.rows = find_rows(inputs, self.how, self.rng, self.rows)
        for _ in range(effort):
            if len(self.rows) >= inputs.span.rank:
                break
            self.rows = look_harder(inputs, self.how, self.rows, _EFFORT, self.rng)
        step(f"decode: {len(self.rows)} rows", len(self.rows), inputs.span.rank)

    def beside(self, inputs: MaskedInputs, scale: Tensor) -> Masked:
        """Return the rows, and beside them the directions of the span that they leave."""
        basis = inputs.span.basis
        inside = self.masked(inputs).rows() * scale @ basis
        return self.masked(inputs, torch.linalg.svd(inside, full_matrices=True).Vh[len(inside) :] @ (basis.T / scale))

    def drop(self, masked: Masked) -> int:
        """Drop the rows that the entries speak against, and return how many."""
        pull = pulls(self.fitting, masked, _COARSE[-1])
        wrong = (pull > _WRONG * pull.median()) & (pull > _WORST * pull.max()) & (pull > 1)
        self.rows = [row for row, bad in zip(self.rows, wrong.tolist(), strict=True) if not bad]
        return int(wrong.sum())

    def keep(self, masks: Tensor) -> None:
        """Give the rows their mended masks; of those that were one row read twice the first stays."""
        rows = {
            (row.token, row.position, tuple(mask.tolist())): replace(row, kept=mask)
            for row, mask in reversed(list(zip(self.rows, masks, strict=True)))
        }
        self.rows = list(reversed(rows.values()))

    def explained(self, inputs: MaskedInputs) -> Explanation | None:
        """Return what the rows explain with masks mended to the last bit, which they keep; None where some miss."""
        masked = self.masked(inputs)
        kept, left = mended(self.fitting, masked, _COARSE)
        masked = replace(masked, kept=kept)
        missing = self.fitting.missing(left, masked.rows(), _COARSE[-1])
        if missing > _STRAY:
            return None
        self.keep(mended(self.fitting, masked, FINE[1:], left)[0])
        return self.told(inputs)

    def told(self, inputs: MaskedInputs) -> Explanation:
        """Return what the rows explain as they are."""
        return explain(self.fitting, self.masked(inputs), [row.position for row in self.rows], self.rng)


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
    effort, beyond = 1, 0
    for _ in range(_ROUNDS):
        fit = state.fit(inputs, beyond)
        if fit is None:
            break
        span = Span(fit.basis, torch.ones_like(fit.lost), fit.rank, 1.0, 0, (), fit.lost, fit.scale)
        inputs = MaskedInputs(model, span, _NEAR, seen.rounded)
        before = len(state.rows)
        state.look(inputs, effort)
        found = len(state.rows)
        if not found:
            if beyond:
                return None
            beyond = max(2, int(_BEYOND * fit.rank))
            continue
        masked = state.beside(inputs, fit.scale)
        dropped = state.drop(masked)
        if dropped:
            continue
        told = state.explained(inputs) if found >= min(_NEARLY * fit.rank, _FEW) else None
        if told is not None and told.whole:
            break
        state.keep(mended(state.fitting, masked, _MIDDLE)[0])
        if told is not None and found == before:
            break  # what is left is nothing that a row could explain
        if found < (1 + _SLOW) * before:
            if found == before and effort >= _MOST_EFFORT:
                break
            effort += found == before
            beyond = max(2, int(_BEYOND * fit.rank))
    if inputs is None or not state.rows:
        return None
    entering = state.masked(inputs).rows()
    if told is None or told.left.shape[1] != len(entering):
        told = state.told(inputs)
    if told.whole:
        basis = torch.linalg.qr(entering.T).Q
        inputs = MaskedInputs(
            model, Span(basis, torch.ones_like(basis[0]), len(entering), 1.0, 0, ()), rounded=seen.rounded
        )
    return DecodedChange(state.rows, inputs, told, entering)
