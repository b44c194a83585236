"""Rows that were missed, looked for where what came back to the decoded ones leaves room for them.

Of r rows let X_f [f, d] be decoded and X_m [q, d] not, D_f and D_m their signals, and N [d, q] the directions of the
row space that are orthogonal to X_f. The gradient G = D_f^T X_f + D_m^T X_m tells G N = D_m^T (X_m N): which directions
the missing rows' signals have. Let P be the left inverse of G N. Then

    P G = (X_m N)^-1 X_m + (P D_f^T) X_f,

the missing rows themselves, up to what the other rows' signals have in the same few directions, which is little. So a
missing row x = X_f^T c + N t has c near (P G X_f^+)^T t: of its r coordinates only q are free, and the others lean.
That is a quadratic term in the linear program, which then mostly decodes what it did not. Where it still does not,
a few coordinates that it gives up first are forbidden, at random: one in two of them was dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.decoding.dropout_masks import HALF
from gradaudit.leakage.decoding.rows import MaskedInputs, Row, Search, nearest
from gradaudit.progress import step

_TRIES = ((0, 8, 4), (8, 16, 2), (16, 24, 1))
"""Programs a round for the nearest tokens of a position, from one rank to another: of those missed the farthest ranked
18th in the whole space (MiniLM, b/d of 0.62). In a smaller one every word of the sentences that are open is near at
every position, and missed ones ranked 31st and later: after a round that found nothing as many more are tried."""
_COPIES, _FIRSTS = 4, 200
"""Programs a round for one more copy of a token that was found, and of the first one, which every sentence has."""
_WHOLE, _BESIDE, _LAST = ((4.0,), (12.0, 1.0, 0.0)), ((0.0,), (4.0, 12.0, 1.0)), 0.4
"""Weights of the leaning in the first program, turn by turn, for one half of the programs and the other: a row whose
signal is weak leans least. In the small space beside proven sentences programs need no help, and half of them get none.
And its weight in the second program, at most."""
_FORBIDDEN, _AMONG, _PER = 5, 30, 12
"""So many coordinates, drawn from so many that are given up first, are forbidden in the second program; in a narrow
model fewer, drawn from a twelfth of the width."""
_SMALL = 0.3
"""Coordinates below this share of the middle one are not forbidden: their bits hardly matter."""
_STEPS, _ROUNDS, _TIES = 80, 2, 1e-3


@dataclass(frozen=True)
class Leaning:
    """Where rows lie that were not decoded: x = t free + c known, with c near t shared.

    Args:
        free: [q, d].
        known: [f, d] decoded rows as they enter.
        shared: [q, f].
        spread: [f] how far from it c is, up to a common factor.
        size: mean square of a row's coordinates.
    """

    free: Tensor
    known: Tensor
    shared: Tensor
    spread: Tensor
    size: float

    @classmethod
    def of(cls, basis: Tensor, rows: Tensor, gradient: Tensor) -> Leaning:
        """Return what a gradient says.

        Args:
            basis: [d, r] orthonormal, of the row space.
            rows: [f, d] decoded rows as they enter.
            gradient: [out, d] of matrices that share this input.
        """
        beside = basis @ torch.linalg.svd(rows @ basis, full_matrices=True).Vh[len(rows) :].T
        signals, hidden = gradient @ torch.linalg.pinv(rows), gradient @ beside
        shared = torch.linalg.pinv(hidden) @ signals
        own = (signals - hidden @ shared).norm(dim=0)
        return cls(beside.T, rows, shared, own / own.mean(), float(rows.square().mean()))

    def beyond(self, certified: Sequence[int], foreign: Tensor) -> Leaning:
        """Return what is left where c is known along some rows.

        Args:
            certified: these rows.
            foreign: [n, q], c = t foreign^T along them.
        """
        others = [i for i in range(len(self.known)) if i not in set(certified)]
        free = self.free + foreign.T @ self.known[list(certified)]
        return Leaning(free, self.known[others], self.shared[:, others], self.spread[others], self.size)

    def space(self) -> Tensor:
        """Return an orthonormal basis [d, q + f] of where they lie."""
        basis: Tensor = torch.linalg.qr(torch.cat([self.free, self.known]).T).Q
        return basis

    def cost(self, inputs: MaskedInputs) -> Tensor:
        """Return [n, n], what it costs a masked row, by its coordinates in a basis, to lie elsewhere than they lean.

        Args:
            inputs: with n directions in its basis.
        """
        read = torch.linalg.pinv(torch.cat([self.free, self.known]).T)
        apart = (read[len(self.free) :] - self.shared.T @ read[: len(self.free)]) / self.spread[:, None]
        by = apart @ inputs.basis
        if len(inputs.shifts):  # of unknown sizes: whatever suits the row best
            shift = apart @ inputs.shifts.T
            by = by - shift @ torch.linalg.pinv(shift) @ by
        cost: Tensor = by.T @ by * self.size  # programs take rows at unit size a coordinate
        return cost


def look_again(
    inputs: MaskedInputs,
    whole: MaskedInputs,
    how: Search,
    found: Sequence[Row],
    cost: Tensor,
    turn: int,
    idle: int,
    rng: torch.Generator,
) -> list[Row]:
    """Return further rows that a round of programs finds at the nearest tokens of every position.

    Args:
        inputs: the masked inputs, in the space where missing rows lie.
        whole: the same in the whole row space.
        how: how far to look.
        found: rows that are known, those of proven sentences included.
        cost: of leaning elsewhere than missing rows do, [n, n] in the inputs' basis.
        turn: number of the round.
        idle: rounds before it that found nothing.
        rng: draws objectives and coordinates.
    """
    owner, clean, forbidden = [], [], []
    kinds = _kinds(inputs, whole, how, found, idle)
    for kind, (rows, tries) in kinds.items():
        x = rows[0].clean if rows else inputs.clean(kind[0], torch.tensor([kind[1]], device=cost.device))[0]
        owner += [kind] * tries
        clean.append(x.expand(tries, -1))
        never = torch.zeros(tries, len(x), dtype=torch.bool, device=cost.device)
        # copies that are not known keep each other from being found: one in ten has dropped any one coordinate
        half = tries if kind[0] == 0 else tries // 2
        known = torch.stack([row.kept for row in rows]) if rows else never[:1]
        never[:half] = inputs.forbid(x, known, half, rng)
        forbidden.append(never)
    if not owner:
        return []
    every, never = torch.cat(clean), torch.cat(forbidden)
    start = torch.zeros_like(never)
    drawn = torch.randperm(len(every), generator=rng).to(every.device)
    for half, weights in enumerate(_WHOLE if inputs is whole else _BESIDE):
        some = drawn[half::2]
        start[some] = _decimated(inputs, every[some], never[some], cost, weights[turn % len(weights)], rng)
    kept, inside = inputs.accepted(every, start, how.rate)
    at = torch.where(inside)[0]
    # a mask that the smaller space lets pass may end, in the whole one, at a copy that is known
    kept, inside = whole.accepted(every[at], kept[at], how.rate)
    more: list[Row] = []
    for n in torch.where(inside)[0].tolist():
        position, token = owner[int(at[n])]
        same = kinds[position, token][0]
        fresh = all(whole.differ(row.clean, kept[n], row.kept) for row in same)
        if fresh and (how.size is None or len(same) < how.size) and len(found) + len(more) < whole.span.rank:
            same.append(Row(token, position, kept[n], every[at[n]]))
            more.append(same[-1])
    step("decode: rows", len(found) + len(more), whole.span.rank)
    return more


def _kinds(
    inputs: MaskedInputs, whole: MaskedInputs, how: Search, found: Sequence[Row], idle: int
) -> dict[tuple[int, int], tuple[list[Row], int]]:
    """Return which tokens are tried at which positions, the copies of each that are known, and how often."""
    prefix = inputs.model.special.prefix[:1]
    kinds: dict[tuple[int, int], tuple[list[Row], int]] = {(0, token): ([], _FIRSTS) for token in prefix}
    for row in found:
        kinds.setdefault((row.position, row.token), ([], _COPIES))[0].append(row)
    for position in range(1 if prefix else 0, min(how.max_length, inputs.model.max_length)):
        for space in (inputs, whole):
            near = space.near(position, nearest(space, how)).tolist()
            for start, end, tries in _TRIES:
                for token in near[start:end]:
                    kinds.setdefault((position, token), ([], tries))
            if idle and space is not whole:
                for token in near[end : end + space.span.rank]:
                    kinds.setdefault((position, token), ([], 1))
    return {kind: tried for kind, tried in kinds.items() if how.size is None or len(tried[0]) < how.size}


def _decimated(
    inputs: MaskedInputs, rows: Tensor, never: Tensor, cost: Tensor, weight: float, rng: torch.Generator
) -> Tensor:
    """Return the masks [n, d] of programs, some of the coordinates given up first forbidden in a second one."""
    one = torch.eye(len(cost), dtype=cost.dtype, device=cost.device)
    first, second = (torch.linalg.inv(one + by * cost) for by in (weight, min(weight, _LAST)))
    relaxed = inputs.relaxed(rows, forbidden=never, leaning=first, rng=rng, steps=_STEPS, rounds=_ROUNDS)
    small = rows.abs() < _SMALL * rows.abs().median(1, keepdim=True).values
    ties = torch.rand(relaxed.shape, generator=rng).to(relaxed) * _TIES
    among = min(_AMONG, max(1, rows.shape[1] // _PER))
    order = torch.where(small | never, 2.0, relaxed + ties).topk(among, largest=False).indices
    drawn = torch.rand(order.shape, generator=rng).topk(among * _FORBIDDEN // _AMONG).indices.to(order.device)
    never = never.scatter(1, order.gather(1, drawn), value=True)
    again = inputs.relaxed(rows, forbidden=never, leaning=second, rng=rng, steps=_STEPS, rounds=_ROUNDS)
    return again > HALF
