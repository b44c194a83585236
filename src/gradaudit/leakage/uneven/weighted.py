"""The entries of a gradient in units of their own line and column, weighted by what is known of each.

Lines and columns differ by a thousand where a few coordinates and tokens have outliers: in one unit for all, a fit of 6
tokens of SmolLM2 stays 0.9 off for good. With rows held fixed, what comes back to them is found line by line: weighted
least squares in which bounds come into force and go.
"""

from collections.abc import Sequence

import numpy as np
import scipy.sparse
import torch
from scipy.optimize import linprog
from torch import Tensor

from gradaudit.leakage.uneven.entries import Entries
from gradaudit.leakage.uneven.least_squares import against, inverses, normal_matrices, solved
from gradaudit.leakage.uneven.steps import PlainStep

Part = tuple[slice | Tensor, slice | Tensor]
EVERY = slice(None)
EVERYTHING: Part = (EVERY, EVERY)
"""Lines and columns of the entries."""

_LINE_TURNS, _LINE_TRIES, _LINE_ENOUGH = 20, 4, 1e-3
"""Lines are solved anew until they gain less than this share, each step cut to a third where it gains nothing."""
_LINE_RIDGE = 1e-13
_WIDE = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03)
"""Floors through which signals are found from nothing. Lines of which six in seven entries are bounds end in a valley
where the first is 0.03 (SmolLM2, 1e-5: 5 of 960 lines, and a chi^2 of 3 million)."""
_STUCK, _FEW_STUCK = 10.0, 0.15
"""Lines that leave so many times the median one's are stuck, where they are no more than this share: of more the rows
are to blame (SmolLM2, 1e-5, right rows: of block 0's 960 lines 1 left two million times the median, of block 1's, where
a twentieth of an entry's kind is known and the others are bounds, 60)."""
_SURE = 4.0
"""Standard deviations in which an entry lies: rounding, which is uniform, makes 1.7."""
_POLISHES = 4
"""Turns of medians over lines and over columns until their units settle."""


def _units(gradient: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the units of lines [n, 1] and of columns [d]: their product is the size of a typical entry.

    Args:
        gradient: [n, d].
        seen: [n, d] bool, entries of which something is known.
    """
    size = torch.where(seen & (gradient != 0), gradient.abs().log(), torch.nan)
    size = torch.where(size.isnan().all(1, keepdim=True) | size.isnan().all(0), size.nanmedian(), size)
    lines, columns = torch.zeros_like(size[:, :1]), torch.zeros_like(size[0])
    for _ in range(_POLISHES):
        lines = (size - columns).nanmedian(1, keepdim=True).values
        columns = (size - lines).nanmedian(0).values
    return lines.exp(), columns.exp()


class Weighted:
    """Entries of a gradient, each with what is known of it.

    Rows count in the units of the columns, signals in those of the lines, [r, d] and [n, r]: known rows are given so.

    Args:
        seen: the entries.
    """

    def __init__(self, seen: Entries) -> None:
        self.seen = seen
        gradient, self.known = seen.step.behind(seen.sent, seen.spread)
        self.there = seen.spread < seen.sent.abs().max()
        self.lines, self.columns = _units(gradient, self.there)
        self.unit = self.lines * self.columns
        self._own = seen.own(gradient) / self.unit
        self.target = gradient / self.unit
        self.linear = isinstance(seen.step, PlainStep) and bool(self.known.all())
        """Whether errors go with no fit and nothing is a bound: one solution of least squares is the best fit."""

    def deviation(self, fit: Tensor, part: Part = EVERYTHING) -> Tensor:
        """Return the standard deviation of each entry of the target beside a fit, [n, d], both in units.

        The error is y's, and the line through fit and target brings it to the gradient: squares of what is left are
        then those of y itself, however far the fit is.

        Args:
            fit: [n, d].
            part: lines and columns that the fit is of.
        """
        unit = self.unit[part]
        slope = self.seen.step.secant(self.target[part] * unit, fit * unit)
        return (self.seen.spread[part] / (slope * unit)).hypot(self._own[part])

    def weights(self, fit: Tensor, floor: float, part: Part = EVERYTHING) -> Tensor:
        """Return one over the variance of each entry of the target, [n, d].

        A saturated entry is a bound: it weighs nothing where the fit lies beyond.

        Args:
            fit: [n, d] in units.
            floor: added to the error.
            part: lines and columns that the fit is of.
        """
        target = self.target[part]
        weights = 1 / (self.deviation(fit, part).square() + floor**2)
        beyond = ~self.known[part] & (fit * target.sign() >= target.abs())
        return torch.where(beyond, torch.zeros_like(weights), weights)

    def signals(self, rows: Tensor, floor: float, left: Tensor | None = None) -> Tensor:
        """Return [n, r], what comes back to rows that are held fixed: the best fit line by line.

        Args:
            rows: [r, d].
            floor: added to each entry's error.
            left: to start from; None for a fit that takes bounds for values.
        """
        every = torch.arange(len(self.target), device=rows.device)
        if left is None:
            return self._descended(rows, floor, every, _WIDE)[0]
        return self._settled(rows, floor, left, every)[0]

    def held(self, rows: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return signals of rows held fixed, [r] what each explains, and what all leave per degree of freedom.

        Both in squared errors: a row that explains nothing beside the others makes about 1, the mean over lines.

        Args:
            rows: [r, d].
        """
        left = self.signals(rows, 0.0)
        weights = self.weights(left @ rows, 0.0)
        alone = inverses(normal_matrices(rows, weights), _LINE_RIDGE).diagonal(dim1=1, dim2=2)
        own = (left.square() / alone).mean(0)
        off = weights * (self.target - left @ rows).square()
        free = int(self.there.sum()) - left.numel()
        return left, own, float(off.sum()) / max(free, 1)

    def freed(self, rows: Tensor, floor: float, left: Tensor) -> Tensor:
        """Return signals with those lines found again that are stuck; see `signals`."""
        left, cost = self._settled(rows, floor, left, torch.arange(len(left), device=left.device))
        stuck = torch.where(cost > _STUCK * cost.median())[0]
        if 0 < len(stuck) <= _FEW_STUCK * len(cost):
            again, lower = self._settled(rows, floor, self._between(rows, left, stuck), stuck)
            better = lower < cost[stuck]
            left[stuck[better]] = again[better]
        return left

    def _between(self, rows: Tensor, left: Tensor, lines: Tensor) -> Tensor:
        """Return some lines' signals that keep to what each entry allows, or else miss it by as little as can be.

        What an entry says is a pair of bounds, so that a linear program finds what descent from a wrong side does not.
        """
        seen, unit = self.seen, self.unit[lines]
        exact = torch.zeros_like(unit)
        own = seen.step.slope(left[lines] @ rows * unit) * self._own[lines] * unit
        error = _SURE * seen.spread[lines].hypot(own)
        pairs = []
        for sign in (-1, 1):
            bound, told = seen.step.behind(seen.sent[lines] + sign * error, exact)
            pairs.append(torch.where(told, bound / unit, sign * torch.inf).cpu().numpy())
        across = rows.T.cpu().numpy()
        width, count = across.shape
        # signals, then by how much each entry is missed, in units of the entries
        missed = -scipy.sparse.eye_array(width)
        sides = [scipy.sparse.hstack([sign * scipy.sparse.csr_array(across), missed]) for sign in (-1, 1)]
        matrix = scipy.sparse.vstack(sides, format="csr")
        cost = np.r_[np.zeros(count), np.ones(width)]
        limits = [(None, None)] * count + [(0, None)] * width
        found = []
        for low, high in zip(*pairs, strict=True):
            most = np.r_[-low, high]
            there = np.isfinite(most)
            told = linprog(cost, matrix[there], most[there], bounds=limits, method="highs")
            found.append(torch.zeros(count) if told.x is None else torch.from_numpy(told.x[:count]))
        return torch.stack(found).to(left)

    def _descended(self, rows: Tensor, floor: float, lines: Tensor, floors: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return some lines' signals found from nothing, floor by floor, and what each leaves; see `signals`."""
        part: Part = (lines, EVERY)
        target = self.target[part]
        error = self.deviation(target, part).square() + floor**2 + (~self.known[part] * target).square()
        left = solved(rows, 1 / error, target / error)
        if self.linear:
            return left, ((target - left @ rows).square() / error).sum(1)
        for wide in (f for f in floors if f > floor):
            left = self._settled(rows, wide, left, lines)[0]
        return self._settled(rows, floor, left, lines)

    def _settled(self, rows: Tensor, floor: float, left: Tensor, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Return some lines' signals from a start, settled, and what each leaves; see `signals`."""
        left = left.clone()
        open_ = torch.arange(len(left), device=left.device)
        part: Part = (lines, EVERY)
        fit, target = left @ rows, self.target[part]
        weights = self.weights(fit, floor, part)
        cost = (weights * (target - fit).square()).sum(1)
        costs = cost.clone()
        for _ in range(_LINE_TURNS):
            # bounds come into force and go while a line settles: each is taken only so far as it gains
            pull = (weights * (target[open_] - left[open_] @ rows)) @ rows.T
            move, far = against(normal_matrices(rows, weights), pull, _LINE_RIDGE), torch.ones_like(cost)
            for _ in range(_LINE_TRIES):
                new = left[open_] + far[:, None] * move
                now_fit = new @ rows
                now_weights = self.weights(now_fit, floor, (lines[open_], EVERY))
                now = (now_weights * (target[open_] - now_fit).square()).sum(1)
                worse = now > cost
                if not bool(worse.any()):
                    break
                far = torch.where(worse, far / 3, far)
            better = now < cost
            left[open_[better]], costs[open_[better]] = new[better], now[better]
            gained = better & (now < (1 - _LINE_ENOUGH) * cost - _LINE_ENOUGH)
            open_, weights, cost = open_[gained], now_weights[gained], now[gained]
            if len(open_) == 0:
                break
        return left, costs
