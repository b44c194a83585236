"""How far dropout keeps a right sentence's rows from the space of what really entered the matrix.

A row of a deeper block has masks of several places in it, and no program decodes them. But the row without masks is
near it, so that the right words are still the nearest. How near is told by masks that the attacker draws: they put the
sentence as far from what enters under them as the client's did, and a wrong word puts it farther.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradaudit.leakage.one_matrix.signal import Fit, Signal
from gradaudit.leakage.one_matrix.word_rows import rows_of
from gradaudit.models.base import TextModel

_DRAWS, _SPREAD = 24, 3.0
"""Times that masks are drawn for a sentence; and by how many standard deviations the client's may be worse. Of twenty
pairs of a sentence and a matrix the right text was within one in 19 and at 3.3 in one, and the wrong word that put it
least far three to thirty farther, in o of block 4 two (MiniLM, dropout of 0.1, in development). Of one sentence under
fourteen clients' masks it was beyond three once in q, p and o of blocks 1 and 2, and four times in f of block 0."""
_LEAST = 1e-6
"""Directions; what is drawn without any dropout does not spread."""


class DrawnMasks:
    """What masks make of sentences.

    Args:
        model: an encoder.
        rate: dropout rate.
        rng: draws masks.
    """

    def __init__(self, model: TextModel, rate: float, rng: torch.Generator) -> None:
        self._model, self._rng = model, rng
        # told the model's own largest rate, a client has its configured ones, which may differ by place
        self._rate = None if rate == model.dropout_rate() else rate
        self._known: dict[tuple[int, ...], tuple[float, float]] = {}

    def likely(self, signal: Signal, fit: Fit) -> bool:
        """Say whether a sentence is hardly farther from a space than masks put it."""
        return self.surprise(signal, fit) < _SPREAD

    def surprise(self, signal: Signal, fit: Fit) -> float:
        """Return by how many standard deviations a sentence is farther from a space than masks put it on average."""
        key = (signal.rank, *fit.tokens.tolist())
        if key not in self._known:  # asked again and again, and drawn once
            far = self._drawn(signal, fit.tokens)
            self._known[key] = float(far.mean()), float(far.std())
        mean, spread = self._known[key]
        return (fit.apart - mean) / max(spread, _LEAST)

    def _drawn(self, signal: Signal, tokens: Tensor) -> Tensor:
        """Return by how many directions a sentence is apart from its own space under masks, once a draw."""
        clean = rows_of(self._model, signal, tokens[None])[0]
        found = []
        for rows in self._entering(signal, tokens.expand(_DRAWS, -1)):
            basis = torch.linalg.qr(signal.parts(rows).double().mT)[0]
            found.append(replace(signal, basis=basis).apart(clean))
        width, others = signal.basis.shape[1], signal.rank - len(clean)
        # other sentences' directions hold a part of what lies outside by chance
        return torch.stack(found) * (1 - max(others, 0) / (width - len(clean)))

    @torch.no_grad()
    def _entering(self, signal: Signal, ids: Tensor) -> Tensor:
        """Return what enters the matrix under masks, [N, n, d], as `rows_of` does without."""
        model = self._model
        role = signal.roles[0] if signal.heads is None else "v"
        name = model.views(signal.layer, role)[0].parameter
        traced = model.traced(
            embeddings=model.word_vectors()[ids],
            mask=torch.ones_like(ids, dtype=torch.bool),
            labels=torch.zeros(len(ids), dtype=torch.long, device=ids.device),
            watch=[name],
            dropout=self._drop,
            rate=self._rate,
            every_row=True,
        )
        rows = traced.taps[name][0].read
        if signal.heads is not None:
            values = model.project(signal.layer, "v", rows.flatten(0, 1))[:, signal.heads]
            rows = values.view(*ids.shape, -1)
        return signal.seen(rows)

    def _drop(self, site: int, inner: Tensor, rate: float) -> Tensor:
        kept = torch.rand(inner.shape, generator=self._rng) >= rate
        return inner * kept.to(inner) / (1 - rate)
