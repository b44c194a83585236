"""The low rank of a gradient whose entries are known unevenly: the fit, its rank, and how sure each direction is.

The gradient of a matrix is D^T X, of rank b (tokens). Entries known to one part in a thousand stand beside others of
which the sign is known; there are many more of the former than unknowns. Least squares weighted by what is known,
on both factors at once: Gauss-Newton steps by conjugate gradients, with each factor's own normal matrices as the
preconditioner. Weights start even and become the true ones by stages, since true ones differ by 1e12 and a start that
trusts them ends in the next valley.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.uneven.entries import Entries
from gradaudit.progress import step as told

_FLOORS = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4, 1e-5)
"""Stages: what is added to each entry's error, in medians of the gradient's size."""
_TURNS = 3
"""Gauss-Newton steps a stage at most."""
_ENOUGH = 0.03
"""A stage ends when a step gains less than this share."""
_SETTLED, _SETTLED_LAST = (1e-3, 40), (1e-5, 200)
"""Conjugate gradients: relative residual and steps at most, of the first stages, then of the last."""
_TRIES = 4
"""Dampings tried a step, each ten times the one before."""
_LINES = 4_000_000
"""Numbers of weighted rows held together while lines are solved: bounds memory."""
_TINY = 1e-10
"""Ridge of a normal matrix, relative to its mean diagonal."""
_RANKS = (24, 48, 96, 192, 288)
"""Ranks tried where none is told."""
_SORTED, _LOOSE = 0.1, 0.5
"""The stage after which directions are sorted out, and the share of a direction's energy that its error has when it is
the noise's. Some too many are kept rather than one too few: true ones stay below 0.3 (95 tokens), and of 15 to 25 that
were too many 5 to 10 stay. Later stages take what they fit for signal."""
_SAMPLES = 2
"""Draws of the noise for the errors of the directions: each brings d numbers a direction."""


@dataclass(frozen=True)
class LowRank:
    """A gradient G = left @ rows of the rank that its entries carry.

    Args:
        left: [n, r].
        rows: [r, d].
        basis: [d, r] orthonormal, of the row space; each column is a direction whose errors go their own way.
        lost: [r] by direction, energy of its error outside the space.
        chi2: of the entries that are known, per degree of freedom.
    """

    left: Tensor
    rows: Tensor
    basis: Tensor
    lost: Tensor
    chi2: float

    @property
    def rank(self) -> int:
        """How many directions."""
        return len(self.rows)


def normal_matrices(rows: Tensor, weights: Tensor) -> Tensor:
    """Return [n, r, r], rows diag(w_i) rows^T for each line w_i of the weights.

    Args:
        rows: [r, d].
        weights: [n, d].
    """
    r = len(rows)
    one, other = torch.triu_indices(r, r, device=rows.device)
    packed = weights @ (rows[one] * rows[other]).T
    out = packed.new_empty((len(weights), r, r))
    out[:, one, other] = packed
    out[:, other, one] = packed
    return out


def _eased(matrices: Tensor, damping: float = 0.0) -> Tensor:
    """Return normal matrices with their diagonals raised, so that each has a root."""
    diagonal = matrices.diagonal(dim1=1, dim2=2)
    return matrices + torch.diag_embed(damping * diagonal + _TINY * diagonal.mean(1, keepdim=True))


def solved(rows: Tensor, weights: Tensor, pull: Tensor) -> Tensor:
    """Return [n, r], the weighted least squares solution of left @ rows = target line by line.

    Args:
        rows: [r, d].
        weights: [n, d].
        pull: [n, d] weights times the target.
    """
    # weights of a line differ by up to 1e16, which normal matrices would square
    root = weights.sqrt()
    target = pull / root.clamp_min(1e-300)
    parts = []
    for some in torch.split(torch.arange(len(root), device=root.device), max(1, _LINES // rows.numel())):
        q, t = torch.linalg.qr(root[some][:, :, None] * rows.T)
        parts.append(torch.linalg.solve_triangular(t, q.mT @ target[some][:, :, None], upper=True)[..., 0])
    return torch.cat(parts)


def _balanced(left: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same product with factors of the same size in every direction: steps need no gauge then."""
    q, t = torch.linalg.qr(rows.T)
    u, s, v = torch.linalg.svd(left @ t.T, full_matrices=False)
    root = s.sqrt()
    return u * root, (root[:, None] * v) @ q.T


def _step(
    weights: Tensor,
    pull: Tensor,
    left: Tensor,
    rows: Tensor,
    damping: float,
    settled: tuple[float, int],
    fixed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the step (dL, dB) that minimizes |w^(1/2) (residual - dL B - L dB)|^2 with damping.

    Args:
        weights: [n, d].
        pull: [n, d] weights times residuals.
        left: [n, r].
        rows: [r, d].
        damping: relative to the normal matrices' diagonals.
        settled: relative residual at which conjugate gradients end, and their steps at most.
        fixed: so many first rows are known and stay.
    """
    of_left = normal_matrices(rows, weights)
    free = left[:, fixed:]
    of_rows = normal_matrices(free.T.contiguous(), weights.T.contiguous())
    at_left, at_rows = of_left.diagonal(dim1=1, dim2=2), of_rows.diagonal(dim1=1, dim2=2)
    chol_left, chol_rows = (torch.linalg.cholesky(_eased(m, damping)) for m in (of_left, of_rows))
    damp_left, damp_rows = damping * at_left, damping * at_rows.T

    def eased(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.cholesky_solve(a[..., None], chol_left)[..., 0]
        return one, torch.cholesky_solve(b.T[..., None].contiguous(), chol_rows)[..., 0].T

    residual = (pull @ rows.T, free.T @ pull)
    found = (torch.zeros_like(left), torch.zeros_like(residual[1]))
    eases = eased(*residual)
    along = eases
    size = first = float((residual[0] * eases[0]).sum() + (residual[1] * eases[1]).sum())
    for _ in range(settled[1]):
        spread = weights * (along[0] @ rows + free @ along[1])
        back = (spread @ rows.T + damp_left * along[0], free.T @ spread + damp_rows * along[1])
        far = size / float((along[0] * back[0]).sum() + (along[1] * back[1]).sum())
        found = (found[0] + far * along[0], found[1] + far * along[1])
        residual = (residual[0] - far * back[0], residual[1] - far * back[1])
        eases = eased(*residual)
        now = float((residual[0] * eases[0]).sum() + (residual[1] * eases[1]).sum())
        if now < settled[0] * first:
            break
        along = (eases[0] + now / size * along[0], eases[1] + now / size * along[1])
        size = now
    return found[0], torch.nn.functional.pad(found[1], (0, 0, fixed, 0))


class Fitting:
    """A weighted low-rank fit in the making.

    Args:
        seen: the entries.
        rng: draws the noise that errors are measured with.
    """

    def __init__(self, seen: Entries, rng: torch.Generator) -> None:
        self.seen, self._rng = seen, rng
        gradient, self.known = seen.step.behind(seen.sent, seen.spread)
        self.scale = float(gradient[self.known].abs().median())
        self.own = seen.own(gradient) / self.scale
        self.target = gradient / self.scale

    def weights(self, gradient: Tensor, floor: float) -> Tensor:
        """Return one over the variance of each entry of the target, 0 where it is not known, [n, d].

        Args:
            gradient: [n, d] the fit, in medians. An entry's error is that at the larger of fit and target: a fit that
                happens to be near zero is not known as finely as a gradient that is.
            floor: added to the error.
        """
        size = torch.maximum(gradient.abs(), self.target.abs()) * self.scale
        error = self.seen.spread / self.seen.step.slope(size) / self.scale
        return self.known / (error.square() + floor**2 + self.own.square())

    def chi2(self, left: Tensor, rows: Tensor, weights: Tensor) -> float:
        """Return the weighted squares per degree of freedom."""
        n, d = self.target.shape
        free = int(self.known.sum()) - len(rows) * (n + d - len(rows))
        return float((weights * (self.target - left @ rows).square()).sum()) / max(free, 1)

    def start(self, known: Tensor, more: int) -> tuple[Tensor, Tensor]:
        """Return factors to start from: known rows, and the leading directions of what they leave, weighted evenly."""
        weights = self.weights(self.target, _FLOORS[0])
        left = solved(known, weights, weights * self.target) if len(known) else self.target[:, :0]
        rest = (self.target - left @ known) * weights / weights.max()
        rows = torch.cat([known, torch.linalg.svd(rest, full_matrices=False).Vh[:more]])
        return solved(rows, weights, weights * self.target), rows

    def stage(self, left: Tensor, rows: Tensor, floor: float, fixed: int = 0) -> tuple[Tensor, Tensor, float]:
        """Return the factors after one stage, and chi^2."""
        settled, damping = (_SETTLED, 1e-3) if floor > 1e-3 else (_SETTLED_LAST, 1e-5)
        for _ in range(_TURNS):
            if not fixed:
                left, rows = _balanced(left, rows)
            weights = self.weights(left @ rows, floor)
            residual = self.target - left @ rows
            before = float((weights * residual.square()).sum())
            after = before
            for _ in range(_TRIES):
                move = _step(weights, weights * residual, left, rows, damping, settled, fixed)
                after = float((weights * (self.target - (left + move[0]) @ (rows + move[1])).square()).sum())
                if after < before:
                    break
                damping = 10 * damping
            if not after < before:
                break
            left, rows, damping = left + move[0], rows + move[1], max(damping / 10, 1e-8)
            if after > (1 - _ENOUGH) * before:
                break
        return left, rows, self.chi2(left, rows, weights)

    def finished(
        self,
        left: Tensor,
        rows: Tensor,
        fixed: int = 0,
        floor: float = _FLOORS[-1],
        settled: tuple[float, int] = _SETTLED_LAST,
    ) -> LowRank:
        """Return the fit with the errors of its directions.

        A sample of the errors is the fit's own answer to a sample of the noise: the same weighted least squares with
        drawn residuals. Direction by direction its energy outside the space is what puts a true row off it.
        """
        if not fixed:
            left, rows = _balanced(left, rows)
        weights = self.weights(left @ rows, floor)
        q, t = torch.linalg.qr(rows.T)
        back = torch.linalg.inv(t)
        energy = torch.zeros_like(t)
        for _ in range(_SAMPLES):
            noise = torch.randn(weights.shape, generator=self._rng).to(weights)
            _, moved = _step(weights, weights.sqrt() * noise, left, rows, 1e-8, settled, fixed)
            turned = moved.T @ back
            turned = turned - q @ (q.T @ turned)
            energy += turned.T @ turned / _SAMPLES
        lost, turn = torch.linalg.eigh(energy)
        chi2 = self.chi2(left, rows, weights)
        return LowRank(left * self.scale, rows, (q @ turn).contiguous(), lost.clamp_min(0), chi2)

    def fit(self, rank: int | None, most: int, known: Tensor | None = None) -> LowRank | None:
        """Return the fit, of the rank that is told or that the entries show; None where they show none up to `most`.

        Args:
            rank: tokens of the batch; None where not known.
            most: largest rank tried.
            known: [f, d] rows of the batch that are known exactly: the others are found the more sharply.
        """
        given = self.target[:0] if known is None else known
        fixed = len(given)
        more = [r for r in _RANKS if r < most - fixed][: 1 if fixed else None]
        for extra in [rank - fixed] if rank is not None else [*more, most - fixed]:
            left, rows = self.start(given, extra)
            for place, floor in enumerate(_FLOORS):
                told(f"low rank: {len(rows)} directions, stage {place + 1} of {len(_FLOORS)}", place, len(_FLOORS))
                left, rows, _ = self.stage(left, rows, floor, fixed)
                if rank is None and floor == _SORTED:
                    left, rows = self._sorted(left, rows, fixed)
                    if len(rows) == extra + fixed and not fixed:
                        break  # all of them stand out: there may be more
            else:
                return self.finished(left, rows, fixed)
        return None

    def _sorted(self, left: Tensor, rows: Tensor, fixed: int) -> tuple[Tensor, Tensor]:
        """Return the factors without the directions that are the noise's."""
        found = self.finished(left, rows, fixed, floor=_SORTED, settled=_SETTLED)
        kept = found.basis[:, found.lost < _LOOSE]
        if fixed:  # the known rows stay as they are, and the others are what is left of the space
            beside = torch.linalg.svd(rows[:fixed] @ kept, full_matrices=True).Vh[fixed:]
            kept = torch.cat([rows[:fixed].T, kept @ beside.T], 1)
        whole = left @ rows
        return whole @ torch.linalg.pinv(kept.T), kept.T.contiguous()
