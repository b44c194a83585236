"""The low rank of a gradient whose entries are known unevenly: the fit, its rank, and how sure each direction is.

The gradient of a matrix is D^T X, of rank b (tokens). Entries known to one part in a thousand stand beside others of
which the sign and a bound are known; there are many more of the former than unknowns. Least squares weighted by what is
known, on both factors at once: Gauss-Newton steps by conjugate gradients, with each factor's own normal matrices as the
preconditioner. Weights start even and become uneven by stages, since true ones differ by 1e12 and a start that trusts
them ends in the next valley.

The rank need not be known. What a fit leaves, weighted, is white where its rank is that of the batch; a direction that
is missing stands out of the spectrum of drawn noise (`Fitting.missing`: 128 over 34 with one of 29 missing), and one
that is too many changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.leakage.uneven.entries import Entries
from gradaudit.leakage.uneven.least_squares import inverses, normal_matrices, solved
from gradaudit.leakage.uneven.weighted import Weighted
from gradaudit.progress import step as told

FLOORS = (0.3, 0.1, 0.03, 0.01)
"""Stages: what is added to each entry's error, in units of its line and column. Rows decode at the last; what is finer
comes of rows that are known exactly."""
_EXACT = 1e-3
"""One more stage where entries are known far better than this, as those that pruning leaves."""
_GROWING = 0.03
"""Directions are added down to this floor."""
_TURNS, _TURNS_GROWING = 3, 6
"""Gauss-Newton steps a stage at most, and between two additions of few directions."""
_ENOUGH = 0.03
"""A stage ends when a step gains less than this share."""
_ROUGH, _SETTLED = (1e-2, 15), (1e-3, 40)
"""Conjugate gradients: relative residual and steps at most, while directions are added, then behind."""
_TRIES = 4
"""Dampings tried a step, each ten times the one before."""
_TINY = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Ridge of a normal matrix with a diagonal of ones."""
_EDGE = 1.05
"""A direction is missing where what is left has a singular value so many times the largest of drawn noise."""
_FEW, _FACTOR, _PART = 8, 3, 2
"""With fewer than an eighth of the directions missing the fit is settled before more are added; at most a third as
many as there are, and half of the values that stand out, since weights spread one direction over several (a quarter
costs this fit twice the time, for the same rank: MiniLM, 95 tokens at 1e-5)."""
_FALLS = 0.8
"""While what is missing falls to this share the fit still converges: what stands out need not be a direction."""
_IDLE = 5
"""Additions that leave no fewer standing out before these pass for errors told too small, or for entries that are none
of the gradient: of true directions every addition takes some away (MiniLM, 95 tokens at 1e-5, 20 additions)."""
_FULL, _TIMES = 0.97, 2
"""Entries that a step of another rate would have made have a full rank: where all of what is left still stands out with
so many times the directions to start from, no low rank will come. Of 96 true ones the first 22 take away two fifths."""
_DUE = 0.1
"""A stage need not fit entries better than to this share of its floor. Without, entries known to 1e-6 (SGD at 0.1) ask
for 127 directions of 50 rows: Gauss-Newton is not that far yet."""
_FIRST = 12
"""Directions to start from where the batch size is not known."""
LARGEST_SHARE = 0.8
"""Largest rank tried of a block, as a share of the width."""
NEAR = 5e-3
"""A row this near a span is looked at, whatever the fit's own error: rows held fixed have wrong bits of small
coordinates, which put others off by up to 2e-3."""
_PER_SENTENCE = 5
"""Directions to start from, a sentence: few sentences are shorter."""
_HIDDEN, _FEWEST = 0.12, 2
"""Share of directions that hide in the noise, and the fewest taken for hidden: with a gradient of 8 sentences seen
through AdamW's rate of 1e-5, 103 of 116 showed; true rows within reach were 59, and 107 with 12 more; 24 more let in
wrong rows (MiniLM)."""
_SAMPLES = 2
"""Draws of the noise for the errors of the directions: each brings d numbers a direction."""
_NO_ERROR = 1e-12
"""Where all rows are held fixed no direction has an error."""
_MOST_SCALED = 30.0
"""Coordinates are scaled by at most this."""


@dataclass(frozen=True)
class LowRank:
    """The row space of a gradient, of the rank that its entries carry.

    Args:
        basis: [d, r] orthonormal, of the row space at `scale`; the errors of its columns are uncorrelated.
        lost: [r] by direction, energy of its error outside the space.
        scale: [d] by which coordinates are multiplied so that all are known alike: those with outliers, whose entries
            are saturated, are known worst.
        left: [n, r] signals, and `rows` [r, d], whose product is the fit: in units of lines and columns.
        rows: see `left`.
    """

    basis: Tensor
    lost: Tensor
    scale: Tensor
    left: Tensor
    rows: Tensor

    @property
    def rank(self) -> int:
        """How many directions."""
        return self.basis.shape[1]

    def span(self, layer: int) -> Span:
        """Return the row space of a block's gradients, with the errors of its directions."""
        return Span(self.basis, torch.ones_like(self.lost), self.rank, 1.0, layer, (), self.lost, self.scale)

    def signals(self, rows: Tensor) -> Tensor:
        """Return [n, k] what the fit brings back to other rows [k, d] of its space, in units of the columns."""
        found: Tensor = self.left @ torch.linalg.lstsq(rows.T, self.rows.T).solution.T
        return found


def started(sentences: int | None) -> int:
    """Return with how many directions the fit of a batch starts; of one sentence where nobody knows how many."""
    return _PER_SENTENCE * (sentences or 1) + 1


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
    free = left[:, fixed:]
    of_left = normal_matrices(rows, weights)
    of_rows = normal_matrices(free.T.contiguous(), weights.T.contiguous())
    damp_left = damping * of_left.diagonal(dim1=1, dim2=2)
    damp_rows = damping * of_rows.diagonal(dim1=1, dim2=2).T
    ridge = damping + _TINY[weights.dtype]
    inverse_left, inverse_rows = inverses(of_left, ridge), inverses(of_rows, ridge)

    def eased(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return (inverse_left @ a[..., None])[..., 0], (inverse_rows @ b.T[..., None])[..., 0].T

    residual = (pull @ rows.T, free.T @ pull)
    found = (torch.zeros_like(left), torch.zeros_like(residual[1]))
    eases = eased(*residual)
    along = eases
    size = first = float((residual[0] * eases[0]).sum() + (residual[1] * eases[1]).sum())
    for _ in range(settled[1] if first > 0 else 0):
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


def _evened(rest: Tensor) -> Tensor:
    """Return a matrix with loud lines and columns turned down: a column of outliers is no direction of the batch."""
    for dim in (0, 1):
        size = rest.square().mean(dim, keepdim=True).sqrt()
        rest = rest / (size / size.median()).clamp_min(1.0)
    return rest


class Fitting(Weighted):
    """A weighted low-rank fit in the making.

    Args:
        seen: the entries.
        rng: draws the noise that errors are measured with.
    """

    def __init__(self, seen: Entries, rng: torch.Generator) -> None:
        super().__init__(seen)
        self._rng = rng
        error = self.deviation(self.target)[self.there].median()
        self._floors = (*FLOORS, _EXACT) if float(error) < _EXACT**2 else FLOORS

    def noise(self, fit: Tensor, weights: Tensor) -> Tensor:
        """Return a draw of what is left of the entries around a fit, weighted: [n, d]."""
        drawn = torch.randn(weights.shape, generator=self._rng).to(weights)
        return weights.sqrt() * self.deviation(fit) * drawn

    def missing(self, left: Tensor, rows: Tensor, floor: float, scaled: bool = False, due: float = 0.0) -> int:
        """Return how many singular values of what a fit leaves, weighted, stand out of noise.

        Args:
            left: [n, r].
            rows: [r, d].
            floor: added to each entry's error.
            scaled: scale noise down to the middle of what is left: saturated entries are surer than their errors say.
                It shows the last row of many (MiniLM, 1e-5, 115 of 116), and the arithmetic's own directions of few.
            due: share of the floor that passes for noise: entries known far better than that are not fitted yet.
        """
        fit = left @ rows
        weights = self.weights(fit, floor)
        drawn = self.noise(fit, weights)
        if due:
            drawn = drawn + due * torch.randn(drawn.shape, generator=self._rng).to(drawn)
        rest, noise = (torch.linalg.svdvals(_evened(t)) for t in (weights.sqrt() * (self.target - fit), drawn))
        size = (rest.median() / noise.median()).clamp(max=1) if scaled else 1.0
        return int((rest > _EDGE * noise[0] * size).sum())

    def _start(self, known: Tensor, more: int) -> tuple[Tensor, Tensor]:
        """Return known rows and the leading directions of what they leave, with their signals."""
        weights = self.weights(self.target, FLOORS[0])
        left = solved(known, weights, weights * self.target) if len(known) else self.target[:, :0]
        return self._grown(left, known, more, FLOORS[0], weights)

    def _grown(
        self, left: Tensor, rows: Tensor, more: int, floor: float, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the factors with the leading directions of what they leave added, each with its own signals."""
        weights = self.weights(left @ rows, floor) if weights is None else weights
        rest = self.target - left @ rows
        fresh = torch.linalg.svd(rest * weights.sqrt(), full_matrices=False).Vh[:more]
        signals = (weights * rest) @ fresh.T / (weights @ fresh.square().T).clamp_min(1e-300)
        return torch.cat([left, signals], 1), torch.cat([rows, fresh])

    def stage(
        self,
        left: Tensor,
        rows: Tensor,
        floor: float,
        fixed: int = 0,
        turns: int = _TURNS,
        settled: tuple[float, int] = _SETTLED,
    ) -> tuple[Tensor, Tensor]:
        """Return the factors after Gauss-Newton steps at one floor; `fixed` first rows stay as they are."""
        damping = 1e-3
        for _ in range(turns):
            if not fixed:
                left, rows = _balanced(left, rows)
            residual = self.target - left @ rows
            weights = self.weights(left @ rows, floor)
            before = after = float((weights * residual.square()).sum())
            single, pull = weights.float(), (weights * residual).float()
            for _ in range(_TRIES):
                move = _step(single, pull, left.float(), rows.float(), damping, settled, fixed)
                new = (left + move[0].double(), rows + move[1].double())
                fit = new[0] @ new[1]
                after = float((self.weights(fit, floor) * (self.target - fit).square()).sum())
                if after < before:
                    break
                damping = 10 * damping
            if not after < before:
                break
            (left, rows), damping = new, max(damping / 10, 1e-6)
            if after > (1 - _ENOUGH) * before:
                break
        return left, rows

    def fit(self, most: int, known: Tensor | None = None, first: int = _FIRST, beyond: int = 0) -> LowRank | None:
        """Return the fit, of as many directions as the entries show; None where they show more than `most`.

        Args:
            most: largest rank tried.
            known: [f, d] rows of the batch that are known exactly: the others are found the more sharply.
            first: directions to start from, beside the known rows.
            beyond: 0 or more; so many times the directions that may hide in the noise are added to those that show.
        """
        given = self.target[:0] if known is None else known
        fixed = len(given)
        left, rows = self._start(given, min(first, most - fixed))
        for place, floor in enumerate(self._floors):
            told(
                f"low rank: {len(rows)} directions, stage {place + 1} of {len(self._floors)}", place, len(self._floors)
            )
            if floor < _GROWING:
                if more := min(beyond * max(_FEWEST, int(_HIDDEN * (len(rows) - fixed))), most - len(rows)):
                    left, rows = self._grown(left, rows, more, floor)
                    beyond = 0
                left, rows = self.stage(left, rows, floor, fixed)
                continue
            left, rows = self.stage(left, rows, floor, fixed, 1, _ROUGH)
            before, settled, fewest, idle = float("inf"), False, float("inf"), 0
            while (missing := self.missing(left, rows, floor, due=_DUE)) and idle < _IDLE:
                falls = missing < _FALLS * before
                if falls or (missing <= max(2, len(rows) // _FEW) and not settled):
                    before, settled = missing, not falls
                    turns = 1 if falls else _TURNS_GROWING
                    left, rows = self.stage(left, rows, floor, fixed, turns, _ROUGH)
                    continue
                full = missing > _FULL * (min(self.target.shape) - len(rows))
                if len(rows) >= (_TIMES * max(first, _FIRST) if full else most):
                    return None
                fewest, idle = (missing, 0) if missing < fewest else (fewest, idle + 1)
                more = max(1, min(missing, len(rows) // _FACTOR, missing // _PART + 1))
                left, rows = self._grown(left, rows, min(more, most - len(rows)), floor)
                left, rows = self.stage(left, rows, floor, fixed, 1, _ROUGH)
                before, settled = missing, False
        return self._finished(left, rows, fixed)

    def _finished(self, left: Tensor, rows: Tensor, fixed: int) -> LowRank:
        """Return the fit's row space with the errors of its directions.

        A sample of the errors is the fit's own answer to a sample of the noise: the same weighted least squares with
        drawn residuals. Direction by direction its energy outside the space is what puts a true row off it.
        """
        floor = self._floors[-1]
        if not fixed:
            left, rows = _balanced(left, rows)
        weights = self.weights(left @ rows, floor)
        drawn = []
        for _ in range(_SAMPLES):
            pull = weights.sqrt() * self.noise(left @ rows, weights)
            drawn.append(_step(weights, pull, left, rows, 1e-8, _SETTLED, fixed)[1])
        moved, fitted, rows = torch.stack(drawn) * self.columns, (left, rows), rows * self.columns
        error = moved.square().sum(1).mean(0).sqrt()
        scale = ((error.median() + _NO_ERROR) / (error + _NO_ERROR)).clamp(1 / _MOST_SCALED, _MOST_SCALED)
        q, t = torch.linalg.qr((rows * scale).T)
        turned = (moved * scale).mT @ torch.linalg.inv(t)
        turned = turned - q @ (q.T @ turned)
        lost, turn = torch.linalg.eigh((turned.mT @ turned).mean(0))
        return LowRank((q @ turn).contiguous(), lost.clamp_min(0), scale, *fitted)
