"""The rows of a batch from entries that are known unevenly: fit, decode, and fit again with what was decoded."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradaudit.leakage.decoding.rows import MaskedInputs, Row, Search, find_rows
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.leakage.uneven.entries import Entries
from gradaudit.leakage.uneven.exact_rows import Explanation, explain, mended
from gradaudit.leakage.uneven.low_rank import Fitting
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import Observation

EXPLAINED = 1.1
"""Entries are explained up to their own errors below this chi^2 per degree of freedom: right rows leave 0.97 to 1.01,
one row or one mask bit of weight that is wrong leaves more than 10."""
_ROUNDS = 6
"""Fits with what the one before decoded."""
_LARGEST_SHARE = 0.8
"""Largest rank tried, as a share of the width."""


@dataclass(frozen=True)
class DecodedChange:
    """Rows decoded from a weight change.

    Args:
        rows: the rows.
        inputs: what dropout masks, and the span: of the rows themselves where they explain everything.
        signals: [n, r] what comes back to each row, and to the directions that no row was decoded for.
        noise: [n, r] a draw of its error; None where something is not explained.
        directions: [r, d] the rows as they enter, then those directions.
        chi2: what the rows leave of the entries that were sent, per degree of freedom.
        rank: directions of the last fit.
    """

    rows: list[Row]
    inputs: MaskedInputs
    signals: Tensor
    noise: Tensor | None
    directions: Tensor
    chi2: float
    rank: int

    def gradient(self, seen: Observation, entries: Entries, drawn: bool = False) -> Observation:
        """Return the observation with the gradient that these rows and signals make in place of the weight change.

        Args:
            seen: the observation.
            entries: of its block 0.
            drawn: add the draw of the error.
        """
        signals = self.signals + self.noise if drawn and self.noise is not None else self.signals
        return replace(seen, kind="gradient", tensors=entries.parts(signals @ self.directions))

    @property
    def explained(self) -> bool:
        """Say whether the rows explain all that was sent, to the last rounding."""
        return self.chi2 < EXPLAINED


def decode_change(
    model: TextModel, seen: Entries, how: Search, rank: int | None, rng: torch.Generator
) -> DecodedChange | None:
    """Return the rows of block 0 behind a weight change; None where no low rank shows.

    Args:
        model: the model.
        seen: entries of its block 0.
        how: how far to look.
        rank: tokens of the batch; None where not known.
        rng: for tries and for the draws of errors.
    """
    fitting = Fitting(seen, rng)
    found = _attempt(fitting, model, how, rank, rng)
    tried = {rank}
    # a rank that is too large blurs the masks: as many as were decoded are the next guess
    while rank is None and found is not None and not found.explained and len(found.rows) not in tried:
        tried.add(len(found.rows))
        again = _attempt(fitting, model, how, len(found.rows), rng)
        if again is None or again.chi2 >= found.chi2:
            break
        found = again
    return found


def _attempt(
    fitting: Fitting, model: TextModel, how: Search, rank: int | None, rng: torch.Generator
) -> DecodedChange | None:
    most = int(_LARGEST_SHARE * model.width)
    rows: list[Row] = []
    best, known, directions = None, None, rank
    for _ in range(_ROUNDS):
        fit = fitting.fit(directions, most, known)
        if fit is None:
            return best
        directions = fit.rank
        span = Span(fit.basis, torch.ones_like(fit.lost), fit.rank, 1.0, 0, (), fit.lost)
        inputs = MaskedInputs(model, span)
        before = len(rows)
        rows = find_rows(inputs, how, rng, rows)
        step(f"decode: {len(rows)} rows", len(rows), fit.rank)
        if not rows:
            return best
        told, masks = _explained(fitting, inputs, rows, how.rate, rng)
        if told.chi2 < EXPLAINED:
            rows = [replace(row, kept=mask) for row, mask in zip(rows, masks, strict=True)]
            entering = _entering(inputs, rows, how.rate)
            basis = torch.linalg.qr(entering.T).Q
            exact = MaskedInputs(model, Span(basis, torch.ones_like(basis[0]), len(rows), 1.0, 0, ()))
            return DecodedChange(rows, exact, told.left, told.noise, entering, told.chi2, len(rows))
        known = _entering(inputs, rows, how.rate)
        best = DecodedChange(rows, inputs, fit.left, None, fit.rows, told.chi2, fit.rank)
        if len(rows) == before or len(rows) >= most:
            break
    return best


def _entering(inputs: MaskedInputs, rows: list[Row], rate: float) -> Tensor:
    clean, kept = torch.stack([row.clean for row in rows]), torch.stack([row.kept for row in rows])
    return inputs.inputs(clean, kept, rate)


def _explained(
    fitting: Fitting, inputs: MaskedInputs, rows: list[Row], rate: float, rng: torch.Generator
) -> tuple[Explanation, list[Tensor]]:
    """Return what the rows explain, their masks as they were or mended, whichever explains more."""
    kept = torch.stack([row.kept for row in rows])
    told = explain(fitting, _entering(inputs, rows, rate), rng)
    if told.chi2 >= EXPLAINED and not inputs.model.dropout_before_norm:
        clean = torch.stack([row.clean for row in rows]) / (1 - rate)
        again = mended(fitting, clean, kept)
        better = explain(fitting, torch.where(again, clean, torch.zeros_like(clean)), rng)
        if better.chi2 < told.chi2:
            return better, list(again)
    return told, list(kept)
