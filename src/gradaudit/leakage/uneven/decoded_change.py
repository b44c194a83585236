"""What was decoded of a weight change: its rows, and the gradient and the words' signals that they make."""

from dataclasses import dataclass, replace

from torch import Tensor

from gradaudit.leakage.decoding.rows import MaskedInputs, Row
from gradaudit.leakage.decoding.word_signals import WordSignals
from gradaudit.leakage.uneven.entries import Entries
from gradaudit.leakage.uneven.exact_rows import Explanation
from gradaudit.models.base import TextModel
from gradaudit.types import Observation

_ROUNDED = 5e-7
"""Rounding of what came back to a head of one word, summed in float32, relative to its root mean square (measured
in a Llama of 4 heads: 3e-7)."""


@dataclass(frozen=True)
class DecodedChange:
    """Rows decoded from a weight change.

    Args:
        rows: the rows.
        inputs: what dropout masks, and the span: of the rows themselves where they explain everything.
        told: what they explain.
        entering: [r, d] the rows as they enter.
        rank: of the batch: the rows, and those that were not found, as what is left of the entries counts them.
    """

    rows: list[Row]
    inputs: MaskedInputs
    told: Explanation
    entering: Tensor
    rank: int

    def gradient(self, seen: Observation, entries: Entries, drawn: float = 0.0) -> Observation:
        """Return the observation with the gradient that these rows and signals make in place of the weight change.

        Args:
            seen: the observation.
            entries: of its block 0.
            drawn: how much of the draw of the error is added.
        """
        signals = self.told.left + drawn * self.told.noise
        return replace(seen, kind="gradient", tensors=entries.parts(signals @ self.entering))

    def blurred(self, seen: Observation, entries: Entries) -> list[Observation]:
        """Return it with the draw of the error added, and taken off; none where the rows do not explain everything."""
        return [self.gradient(seen, entries, drawn) for drawn in (1.0, -1.0)] if self.told.whole else []

    def words(self, model: TextModel, entries: Entries) -> WordSignals | None:
        """Return what came back to the queries and keys of rows that no dropout touched; None where it was not seen.

        Args:
            model: the model.
            entries: of its block 0.
        """
        views, family = [model.views(0, role)[0].name for role in "qk"], model.family
        if not set(views) <= set(entries.groups):
            return None
        # what is not explained lies on the signals, too
        errors = entries.parts(self.told.error * max(1.0, self.told.chi2) ** 0.5)
        signals = entries.parts(self.told.left)
        sent = {role: model.project(0, role, self.entering) for role in "qk"}
        toward, unsure = (
            [part[view].T.reshape(like.shape) for view, like in zip(views, sent.values(), strict=True)]
            for part in (signals, errors)
        )
        # float32 rounds what each word sends along its row, too, which no entry's residual shows
        unsure = [
            e.hypot(_ROUNDED * t.square().mean(2, keepdim=True).sqrt()) for e, t in zip(unsure, toward, strict=True)
        ]
        places = [row.position for row in self.rows] if model.absolute_positions else None
        queries, keys = (family.compared(0, role, some) for role, some in sent.items())

        def returned(role: str, words: Tensor, slopes: Tensor) -> Tensor:
            return family.returned(0, role, sent[role][words], slopes)

        beside = (family.turned, places, returned, family.lost, family.plain_scores)
        return WordSignals(toward[0], toward[1], unsure[0], unsure[1], queries, keys, *beside)
