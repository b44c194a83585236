"""What one shared matrix tells: the space that its inputs span, and how well rows fill it.

A wrong word repeated at many places lies near the space at each of them. So rows are judged together: those of the
right sentence are as many as the space has directions, and span it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gradaudit.leakage.rowspace.subspace import span
from gradaudit.models.base import TextModel
from gradaudit.types import Observation

_RIDGE = 1e-9
"""Added to the Gram matrix of unit rows, so that rows that are all but the same fill one direction, not two."""


@dataclass(frozen=True)
class Signal:
    """The space of what enters one matrix, or several that read the same.

    Args:
        layer: block.
        roles: of the matrices.
        basis: [d, r] orthonormal columns, float64.
        differences: only differences of a sentence's rows are in it. The scores of a query change by nothing where all
            keys are moved alike, so that a key matrix's slopes of a sentence add up to zero.
        taken: [d, t] orthonormal directions of sentences that were taken out; None for none.
    """

    layer: int
    roles: str
    basis: Tensor
    differences: bool
    taken: Tensor | None = None

    @property
    def keys(self) -> list[tuple[int, str]]:
        """Block and role of every matrix; all read the same rows."""
        return [(self.layer, role) for role in self.roles]

    @property
    def rank(self) -> int:
        """Directions of the space."""
        return self.basis.shape[1]

    def apart(self, rows: Tensor) -> Tensor:
        """Return by how many directions the space and that of some rows differ, [...]; 0 where one holds the other.

        It is the dimension of the smaller one, minus the squared cosines of the angles between the two.

        Args:
            rows: [..., m, d], of any length.
        """
        unit = F.normalize(rows.double(), dim=-1)
        inside = unit @ self.basis
        gram = unit @ unit.mT + _RIDGE * torch.eye(unit.shape[-2], dtype=unit.dtype, device=unit.device)
        shared = torch.cholesky_solve(inside, torch.linalg.cholesky(gram))
        left: Tensor = min(self.rank, unit.shape[-2]) - (inside * shared).sum((-2, -1))
        return left

    def seen(self, rows: Tensor) -> Tensor:
        """Return what counts of sentences' rows [..., n, d]: differences, and what was not taken out."""
        if self.differences:
            rows = rows[..., 1:, :] - rows[..., :1, :]
        return self.beside(rows)

    def beside(self, rows: Tensor) -> Tensor:
        """Return the part of rows [..., d] that is orthogonal to sentences that were taken out."""
        if self.taken is None:
            return rows
        taken = self.taken.to(rows.dtype)
        return rows - (rows @ taken) @ taken.mT

    def without(self, rows: Tensor) -> Signal:
        """Return the space beside the rows [m, d] of a sentence that lies in it."""
        own = torch.linalg.qr(rows.double().mT)[0]
        taken = own if self.taken is None else torch.cat([self.taken, own], 1)
        left = self.basis - own @ (own.mT @ self.basis)
        basis = torch.linalg.svd(left, full_matrices=False)[0][:, : max(self.rank - own.shape[1], 0)]
        return replace(self, basis=basis.contiguous(), taken=taken)


def shares(signal: Signal, rows: Tensor, chosen: Tensor) -> Tensor:
    """Return which share of what each row adds to chosen ones lies in the space, 0 to 1, [...].

    Only the part that is orthogonal to the chosen rows counts, so that a row much like one of them says little.

    Args:
        signal: the space.
        rows: [..., d] candidates.
        chosen: [m, d] rows that are there already.
    """
    directions = torch.linalg.qr(chosen.mT)[0]
    basis = signal.basis.to(rows.dtype)
    along = rows @ directions
    inside = rows @ basis - along @ (directions.mT @ basis)
    share: Tensor = inside.square().sum(-1) / added(rows.square().sum(-1), along.square().sum(-1))
    return share


class Remaining:
    """`shares` of many rows, kept up to date while rows are chosen.

    Args:
        signal: the space.
        rows: [..., d] candidates.
        chosen: [m, d] rows that are there already.
    """

    def __init__(self, signal: Signal, rows: Tensor, chosen: Tensor) -> None:
        self._rows, self._basis = rows, signal.basis.to(rows.dtype)
        self._directions = torch.linalg.qr(chosen.mT)[0].mT
        along = rows @ self._directions.mT
        self._inside = rows @ self._basis - along @ (self._directions @ self._basis)
        self._whole = rows.square().sum(-1)
        self._along = along.square().sum(-1)

    def choose(self, row: Tensor) -> None:
        """Take a row [d] into those chosen."""
        unit = F.normalize(row, dim=-1)
        for _ in range(2):  # once is not orthogonal to rounding
            unit = F.normalize(unit - (self._directions @ unit) @ self._directions, dim=-1)
        self._directions = torch.cat([self._directions, unit[None]])
        along = self._rows @ unit
        self._inside -= along[..., None] * (unit @ self._basis)
        self._along += along.square()

    @property
    def share(self) -> Tensor:
        """[...] of each candidate, the share of its new part that lies in the space, 0 to 1."""
        share: Tensor = self._inside.square().sum(-1) / added(self._whole, self._along)
        return share


def added(whole: Tensor, along: Tensor) -> Tensor:
    """Return the square norm of what rows add to chosen ones, from their own and that of what lies along these."""
    return torch.maximum(whole - along, 1e-9 * whole)


def signal_of(seen: Observation) -> Signal | None:
    """Return what the most telling of the shared matrices says; None where none holds rows of more than one token.

    The first block's tell most, for their rows depend least on the words around. In a block, q and v read the same and
    come first, then the feed-forward's first matrix; keys lack a direction; the feed-forward's second matrix, whose
    input is far from the words, is the last choice.

    Args:
        seen: one gradient.
    """
    model: TextModel = seen.model
    for roles in ("qkv", "f", "p"):
        for layer in range(model.depth):
            found = span(seen, layer, roles)
            if found is not None and 1 < found.rank < found.basis.shape[0]:
                differences = found.roles == ("k",) and model.absolute_positions
                return Signal(layer, "".join(found.roles), found.basis, differences)
    return None
