"""What one shared matrix tells: the space that its inputs span, and how well rows fill it.

A wrong word repeated at many places lies near the space at each of them. So rows are judged together: those of the
right sentence are as many as the space has directions, and span it.

The attention's output matrix reads values that attention has mixed, and a word's own row is not in that space. But a
head mixes its own values alone: what its columns of the gradient span is what the head's values span, as long as there
are fewer tokens than the head is wide. So its rows are the words' values, judged head by head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

_RIDGE = 1e-9
"""Added to the Gram matrix of unit rows, so that rows that are all but the same fill one direction, not two."""


@dataclass(frozen=True)
class Signal:
    """The space of what enters one matrix, or several that read the same.

    Args:
        layer: block.
        roles: of the matrices.
        basis: [h, w, r] orthonormal columns, float64: of one part, the whole row, or of a row's values head by head.
        differences: only differences of a sentence's rows are in it. The scores of a query change by nothing where all
            keys are moved alike, so that a key matrix's slopes of a sentence add up to zero.
        heads: [h] numbers of the heads whose values are in it; None where what enters the matrix itself is.
        taken: [h, w, t] orthonormal directions of sentences that were taken out; None for none.
        scale: [h w] by what rows are multiplied: coordinates whose entries are known worst count less. None for ones.
        blur: directions by which right rows are apart, at most, by the errors of the update's entries.
        doubtful: so many directions may be of errors alone.
    """

    layer: int
    roles: str
    basis: Tensor
    differences: bool
    heads: Tensor | None = None
    taken: Tensor | None = None
    scale: Tensor | None = None
    blur: float = 0.0
    doubtful: int = 0

    @property
    def keys(self) -> list[tuple[int, str]]:
        """Block and role of every matrix; all read the same rows."""
        return [(self.layer, role) for role in self.roles]

    @property
    def rank(self) -> int:
        """Directions of the space, of each part."""
        return self.basis.shape[2]

    def parts(self, rows: Tensor) -> Tensor:
        """Return rows [..., h w] by part, [h, ..., w]."""
        return rows.view(*rows.shape[:-1], *self.basis.shape[:2]).movedim(-2, 0)

    def apart(self, rows: Tensor) -> Tensor:
        """Return by how many directions the space and that of some rows differ, [...]; 0 where one holds the other.

        It is the dimension of the smaller one, minus the squared cosines of the angles between the two; of several
        parts their mean. What errors make of right rows is taken off.

        Args:
            rows: [..., m, h w], of any length.
        """
        unit = F.normalize(self.parts(rows).double(), dim=-1)
        inside = unit @ self.basis.view(len(self.basis), *(1,) * (unit.dim() - 3), *self.basis.shape[1:])
        gram = unit @ unit.mT + _RIDGE * torch.eye(unit.shape[-2], dtype=unit.dtype, device=unit.device)
        shared = torch.cholesky_solve(inside, torch.linalg.cholesky(gram))
        left: Tensor = min(self.rank, unit.shape[-2]) - (inside * shared).sum((-2, -1)).mean(0)
        return left - self.blur

    def within(self, rows: Tensor) -> Tensor:
        """Return which share of each row [..., h w] lies in the space, 0 to 1, [...]."""
        found: Tensor = (flat(self, rows) @ self.basis.to(rows.dtype)).square().sum((0, -1)).view(rows.shape[:-1])
        return found / rows.square().sum(-1)

    def seen(self, rows: Tensor) -> Tensor:
        """Return what counts of sentences' rows [..., n, h w]: differences, and what was not taken out."""
        if self.differences:
            rows = rows[..., 1:, :] - rows[..., :1, :]
        return self.beside(rows)

    def beside(self, rows: Tensor) -> Tensor:
        """Return the part of rows [..., h w] that is orthogonal to sentences that were taken out."""
        if self.taken is None:
            return rows
        taken, parts = self.taken.to(rows.dtype), flat(self, rows)
        return (parts - (parts @ taken) @ taken.mT).movedim(0, -2).reshape(rows.shape)

    def without(self, rows: Tensor) -> Signal:
        """Return the space beside the rows [m, h w] of a sentence that lies in it."""
        own = torch.linalg.qr(self.parts(rows).double().mT)[0]
        taken = own if self.taken is None else torch.cat([self.taken, own], 2)
        left = self.basis - own @ (own.mT @ self.basis)
        basis = torch.linalg.svd(left, full_matrices=False)[0][..., : max(self.rank - own.shape[2], 0)]
        return replace(self, basis=basis.contiguous(), taken=taken)


@dataclass(frozen=True)
class Fit:
    """A sentence and what it leaves of the space.

    Args:
        tokens: [n] ids.
        apart: directions of the space that its rows do not fill.
    """

    tokens: Tensor
    apart: float


def flat(signal: Signal, rows: Tensor) -> Tensor:
    """Return rows [..., h w] by part, all in one line, [h, N, w]."""
    return signal.parts(rows.reshape(-1, rows.shape[-1]))


def shares(signal: Signal, rows: Tensor, chosen: Tensor) -> Tensor:
    """Return which share of what each row adds to chosen ones lies in the space, 0 to 1, [...].

    Only the part that is orthogonal to the chosen rows counts, so that a row much like one of them says little.

    Args:
        signal: the space.
        rows: [..., d] candidates.
        chosen: [m, d] rows that are there already.
    """
    directions = torch.linalg.qr(signal.parts(chosen).mT)[0]
    basis, parts = signal.basis.to(rows.dtype), flat(signal, rows)
    along = parts @ directions
    inside = parts @ basis - along @ (directions.mT @ basis)
    share: Tensor = inside.square().sum((0, -1)) / added(parts.square().sum((0, -1)), along.square().sum((0, -1)))
    return share.view(rows.shape[:-1])


class Remaining:
    """`shares` of many rows, kept up to date while rows are chosen.

    Args:
        signal: the space.
        rows: [..., d] candidates.
        chosen: [m, d] rows that are there already.
    """

    def __init__(self, signal: Signal, rows: Tensor, chosen: Tensor) -> None:
        self._signal, self._shape = signal, rows.shape[:-1]
        self._rows, self._basis = flat(signal, rows), signal.basis.to(rows.dtype)
        self._directions = torch.linalg.qr(signal.parts(chosen).mT)[0].mT
        along = self._rows @ self._directions.mT
        self._inside = self._rows @ self._basis - along @ (self._directions @ self._basis)
        self._whole = self._rows.square().sum((0, -1))
        self._along = along.square().sum((0, -1))

    def choose(self, row: Tensor) -> None:
        """Take a row [h w] into those chosen."""
        unit = F.normalize(self._signal.parts(row[None]), dim=-1)
        for _ in range(2):  # once is not orthogonal to rounding
            unit = F.normalize(unit - (unit @ self._directions.mT) @ self._directions, dim=-1)
        self._directions = torch.cat([self._directions, unit], 1)
        along = self._rows @ unit.mT
        self._inside -= along * (unit @ self._basis)
        self._along += along.square().sum((0, -1))

    @property
    def share(self) -> Tensor:
        """[...] of each candidate, the share of its new part that lies in the space, 0 to 1."""
        share: Tensor = self._inside.square().sum((0, -1)) / added(self._whole, self._along)
        return share.view(self._shape)


def added(whole: Tensor, along: Tensor) -> Tensor:
    """Return the square norm of what rows add to chosen ones, from their own and that of what lies along these."""
    return torch.maximum(whole - along, 1e-9 * whole)
