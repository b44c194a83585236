"""Rows known exactly: their masks bit by bit, which of them do not hold, and what they explain of all that was sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradaudit.leakage.decoding.rows import MaskedInputs
from gradaudit.leakage.uneven.least_squares import inverses, normal_matrices, solved
from gradaudit.leakage.uneven.weighted import EVERY, Part, Weighted

EXPLAINED = 1.1
"""Entries are explained up to their own errors below this chi^2 per degree of freedom: right rows leave 0.8 to 1.01
(less than 1 where saturated entries all round alike), one wrong row or weighty mask bit leaves more than 10."""
NOT_EXPLAINED = "what was decoded does not explain every weight's rounding: nothing is proven"
APART = 100.0
"""Another token in a row's place must cost this much of chi^2: ten standard deviations."""
FINE = (0.01, 1e-3, 1e-4, 1e-5, 0.0)
"""What is added to each entry's error while masks are mended, in units of its line and column: coarse errors first."""
_PASSES = 8
"""Rounds of exchanged bits a floor at most; the last floor ends with one of all columns."""
_GAIN, _FIRST = 16.0, 0.02
"""A mask bit is exchanged when chi^2 falls by this much, by chance once in 15,000; and the share of the round's largest
gain that it has: wrong bits of weight are exchanged before what they pull along."""
_NEAR = 0.2
"""Columns are looked at again where a bit had this share of the gain that exchanges it."""
_ASTRAY = 1.5
"""A column that leaves so many times what the median one does has a bit that is far wrong."""
_EACH = 4
"""Every so many columns tell a wrong row."""
_LEVERAGE = 1 - 1e-4
"""Largest share of its own signal that an entry is taken to make alone."""
_BYTES = 80_000_000
"""Of left-out signals held together: bounds memory."""
_WORDS = 4096
"""Tokens compared together: bounds memory."""
_TELLING = 32
"""Coordinates by which tokens are told apart first, those that cost most."""
_SLACK = 2.0
"""A token whose bound is less than this many times what proves is measured: float32 and rows that are rounded to bf16
make bounds less wrong than that."""
_RIDGE = 1e-12


@dataclass(frozen=True)
class Explanation:
    """What inputs known exactly leave of the entries.

    Args:
        left: [n, r] signals D^T, in the gradient's unit.
        chi2: squared residuals of all entries per degree of freedom: 1 when the inputs are those of the batch.
        error: [n, r] the standard deviation of `left`.
        noise: [n, r] a draw of its error.
        apart: [f] by how much chi^2 would grow at least were a row another token's, under the mask that suits it best.
        own: [r] by how much chi^2 would grow were the row left out, a signal: about 1 of a row that explains nothing.
        sharp: whether `chi2` would show a missing row, were it as weak as the weakest.
    """

    left: Tensor
    chi2: float
    error: Tensor
    noise: Tensor
    apart: Tensor
    own: Tensor
    sharp: bool

    @property
    def whole(self) -> bool:
        """Say whether the rows explain all that was sent, to the last rounding, and no others would."""
        return self.chi2 < EXPLAINED and bool((self.apart > APART).all())


@dataclass(frozen=True)
class Masked:
    """Rows with masks, and directions beside them.

    Args:
        inputs: what dropout masks.
        clean: [f, d] rows before dropout.
        kept: [f, d] bool.
        rate: dropout rate.
        others: [e, d] directions of rows that are not known, in units of the columns.
        columns: [d] the fitting's units.
    """

    inputs: MaskedInputs
    clean: Tensor
    kept: Tensor
    rate: float
    others: Tensor
    columns: Tensor

    def entering(self) -> Tensor:
        """Return the rows as they enter, [f, d]."""
        return self.inputs.inputs(self.clean, self.kept, self.rate)

    def rows(self) -> Tensor:
        """Return the rows as they enter, in units of the columns, then the other directions, [f + e, d]."""
        return torch.cat([self.entering() / self.columns, self.others])

    def moves(self) -> Tensor:
        """Return [f, d], what the exchange of each bit adds to its row, in units of the columns."""
        by = self.inputs.slope(self.clean, self.kept, self.rate) / self.columns
        return torch.where(self.kept, -by, by)


def explain(
    fitting: Weighted,
    known: Masked,
    apart: Callable[[Tensor], Tensor],
    rng: torch.Generator,
    left: Tensor | None = None,
) -> Explanation:
    """Return the signals that explain the entries best by these rows alone, and what they leave.

    Args:
        fitting: of the entries.
        known: the rows.
        apart: [f] the least growth of chi^2 by another row in each one's place, from that by a square of each
            coordinate, [f, d].
        rng: draws the noise of the signals.
        left: [n, r] signals to start from, in units of the lines; None for a start from nothing, floor by floor.
    """
    seen, rows = fitting.seen, known.rows()
    for floor in FINE if left is None else ():
        left = fitting.signals(rows, floor, left)
    assert left is not None
    left = fitting.freed(rows, FINE[-1], left)
    weights = fitting.weights(left @ rows, FINE[-1])
    gradient = left @ rows * fitting.unit
    off = (seen.sent - seen.step.sent(gradient)) / seen.error(gradient)
    free = int(fitting.there.sum()) - left.numel()
    noise = torch.randn(weights.shape, generator=rng).to(weights)
    drawn = solved(rows, weights, weights.sqrt() * noise)
    least = apart(_judged(fitting, known, FINE[-1], left).energy)
    alone = inverses(normal_matrices(rows, weights), _RIDGE).diagonal(dim1=1, dim2=2)
    own = torch.where(alone > 0, left.square() / alone, 0.0)
    sharp = float(own.sum(0).min()) > (EXPLAINED - 1) * free
    chi2 = float(off.square().sum()) / free
    errors = alone.clamp_min(0).sqrt() * fitting.lines
    return Explanation(left * fitting.lines, chi2, errors, drawn * fitting.lines, least, own.mean(0), sharp)


def astray(fitting: Weighted, rows: Tensor, left: Tensor) -> tuple[int, float]:
    """Return the row that most of what is left goes with, and how alike they come back to the lines, 0 to 1.

    A row that is slightly wrong leaves one direction, which comes back to the lines as the row does.

    Args:
        fitting: of the entries.
        rows: [r, d].
        left: [n, r] their signals.
    """
    fit = left @ rows
    weights = fitting.weights(fit, FINE[-1])
    rest = torch.linalg.svd(weights.sqrt() * (fitting.target - fit), full_matrices=False).U[:, 0]
    lines = torch.nn.functional.normalize(left * weights.mean(1, keepdim=True).sqrt(), dim=0)
    likeness = (rest @ lines).abs()
    return int(likeness.argmax()), float(likeness.max())


def other_tokens(masked: Masked, positions: Sequence[int], energy: Tensor) -> Tensor:
    """Return [f] the least growth of chi^2 by another token in each row's place, coordinates kept or not as suits it.

    What a few coordinates cost is a lower bound, which counts where it is far above what proves.

    Args:
        masked: the rows.
        positions: of each row.
        energy: [f, d] growth of chi^2 by a square of the coordinate.
    """
    inputs, rate, rows, columns = masked.inputs, masked.rate, masked.rows(), masked.columns
    count, device = inputs.model.vocabulary_size, energy.device
    typical = inputs.clean(0, torch.arange(0, count, max(1, count // _WORDS), device=device)).div(columns).var(0)
    least = torch.full_like(energy[:, 0], torch.inf)

    def costing(at: int, ids: Tensor) -> Tensor:
        """Return the growth by each of some tokens, but for the row's own."""
        clean = inputs.clean(positions[at], ids)
        clean = clean[(clean != masked.clean[at]).any(1)]
        kept = torch.ones_like(clean, dtype=torch.bool)
        with_it = inputs.inputs(clean, kept, rate) / columns
        return _costing(with_it, with_it - inputs.slope(clean, kept, rate) / columns, rows[at], energy[at])

    for at, position in enumerate(positions):
        few = (energy[at] * typical).topk(min(_TELLING, len(typical))).indices
        kept, dropped = (part.double() / columns[few] for part in inputs.roughly(position, few, rate))
        bound = _costing(kept, dropped, rows[at, few], energy[at, few])
        near = bound < _SLACK * APART
        costs = [bound[~near], *(costing(at, ids) for ids in torch.split(torch.where(near)[0], _WORDS))]
        least[at] = torch.cat(costs).min()
    return least


def _costing(with_it: Tensor, without: Tensor, row: Tensor, energy: Tensor) -> Tensor:
    """Return the growth of chi^2 by each of some tokens in a row's place, every coordinate kept or not as suits it."""
    return torch.minimum((with_it - row).square(), (without - row).square()) @ energy


@dataclass(frozen=True)
class _Judged:
    """Bits and rows judged by what the other columns say.

    Args:
        gain: [f, d] fall of chi^2 by the exchange of a bit.
        pull: [f, d] fall of chi^2 were the coordinate free: about 1 of a right row.
        energy: [f, d] growth of chi^2 by a square of the coordinate.
        left: [n, r] signals.
    """

    gain: Tensor
    pull: Tensor
    energy: Tensor
    left: Tensor


def _judged(
    fitting: Weighted, known: Masked, floor: float, left: Tensor | None, columns: Tensor | None = None
) -> _Judged:
    """Judge every mask bit by the signals that the *other* columns fix.

    A wrong bit bends the signals to itself wherever an entry of its column is known best, so that it looks right. Left
    out of line i's least squares, entry (i, j) predicts nothing of itself: with leverage h and residual r, the signals
    without it are L_i - A_i^-1 x_j w r / (1 - h), and what they leave of it r / (1 - h), with their own variance
    x_j^T A_i^-1 x_j / (1 - h). What rows that are not known bring to the column is free.
    """
    rows, moves = known.rows(), known.moves()
    count = len(moves)
    left = fitting.signals(rows, floor, left)
    weights = fitting.weights(left @ rows, floor)
    inverse = inverses(normal_matrices(rows, weights), _RIDGE)
    rest = fitting.target - left @ rows
    gain, pull, energies = torch.zeros_like(moves), torch.zeros_like(moves), torch.zeros_like(moves)
    columns = torch.arange(rows.shape[1], device=rows.device) if columns is None else columns
    for some in torch.split(columns, max(1, _BYTES // (8 * left.numel()))):
        x, w = rows[:, some], weights[:, some]
        swing = inverse @ x
        unsure = torch.einsum("nrj,rj->nj", swing, x)
        lever = (w * unsure).clamp(0, _LEVERAGE)
        apart = rest[:, some] / (1 - lever)
        without = left[:, :, None] - swing * (w * apart)[:, None]
        seen = fitting.weights(fitting.target[:, some] - apart, floor, (EVERY, some))
        weight = seen / (1 + seen * unsure / (1 - lever))
        own = without[:, :count]
        along = torch.einsum("nfj,nj->fj", own, weight * apart)
        if len(known.others):
            free = without[:, count:].permute(2, 1, 0)
            weighted = free * weight.T[:, None]
            inner = inverses(weighted @ free.mT, _RIDGE)
            cross = weighted @ own.permute(2, 0, 1)
            back = inner @ cross
            along = along - (back.mT @ (weighted @ apart.T[..., None]))[..., 0].T
            taken = (cross * back).sum(1).T
        else:
            taken = torch.zeros_like(along)
        energy = (torch.einsum("nfj,nj->fj", own.square(), weight) - taken).clamp_min(0)
        move = moves[:, some]
        gain[:, some] = 2 * move * along - move.square() * energy
        if not len(known.others):
            # far from the truth the slope at a wrong fit says little: what a bit gains there is counted
            cost = (weight * apart.square()).mean(0)
            for at in torch.where(cost > _ASTRAY * cost.median())[0].tolist():
                part = (EVERY, some[at : at + 1])
                fit = fitting.target[part] - apart[:, at : at + 1]
                whole = unsure[:, at : at + 1] / (1 - lever[:, at : at + 1])
                gain[:, some[at]] = cost[at] * len(fit) - _costs(
                    fitting, fit + without[:, :count, at] * move[:, at], whole, floor, part
                )
        pull[:, some] = along.square() / energy.clamp_min(1e-300)
        energies[:, some] = energy
    return _Judged(gain, pull, energies, left)


def _costs(fitting: Weighted, fits: Tensor, unsure: Tensor, floor: float, part: Part) -> Tensor:
    """Return [k] the squares that each of some fits [n, k] of one column leaves.

    Args:
        fitting: of the entries.
        fits: predictions of the column.
        unsure: [n, 1] their variance.
        floor: added to each entry's error.
        part: the column.
    """
    seen = fitting.weights(fits, floor, part)
    return (seen / (1 + seen * unsure) * (fitting.target[part] - fits).square()).sum(0)


def pulls(fitting: Weighted, masked: Masked, floor: float, left: Tensor) -> Tensor:
    """Return [f] how far each row is from what the entries say of it, far more of a wrong row than of the right ones.

    Args:
        fitting: of the entries.
        masked: the rows.
        floor: added to each entry's error.
        left: [n, r] signals to start from, in units of the lines.
    """
    columns = torch.arange(0, masked.clean.shape[1], _EACH, device=masked.clean.device)
    return _judged(fitting, masked, floor, left, columns).pull[:, columns].median(1).values


def mended(
    fitting: Weighted, masked: Masked, floors: tuple[float, ...] = FINE, left: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the masks, [f, d] bool, with the bits exchanged that explain the entries better, and the signals.

    A coordinate too small to move its row out of the span by more than the span's own error is decoded by chance. All
    entries of its column together tell it.

    Args:
        fitting: of the entries.
        masked: the rows.
        floors: what is added to each entry's error, in order.
        left: [n, r] signals to start from, in units of the lines.
    """
    for floor in floors:
        near = None
        for _ in range(_PASSES):
            found = _judged(fitting, masked, floor, left, near)
            left = found.left
            best, at = found.gain.max(0)  # one row a column: two moves in a column share the column's residual
            columns = torch.where(best > torch.clamp(_FIRST * best.max(), min=_GAIN))[0]
            if len(columns) == 0:
                if near is None or floor > 0:
                    break
                near = None
                continue
            near = torch.where(best > _NEAR * _GAIN)[0]
            kept = masked.kept.clone()
            kept[at[columns], columns] ^= True
            masked = replace(masked, kept=kept)
            if len(masked.others):
                masked = replace(masked, others=_others(fitting, masked, floor, left))
    assert left is not None
    return masked.kept, left


def _others(fitting: Weighted, masked: Masked, floor: float, left: Tensor) -> Tensor:
    """Return the directions of rows that are not known, found anew beside the known rows."""
    rows, count = masked.rows(), len(masked.clean)
    weights = fitting.weights(left @ rows, floor).T.contiguous()
    free = left[:, count:].T.contiguous()
    rest = (fitting.target - left[:, :count] @ rows[:count]).T
    inverse = inverses(normal_matrices(free, weights), _RIDGE)
    return (inverse @ ((weights * rest) @ free.T)[..., None])[..., 0].T
