"""Signals of known rows through several steps of Adam: what each row sent in each step, line by line.

The gradients of step k are G_k = sum over p of T[p, k] A_p X: rows X are known and the same in every step, T says how
signals may change from step to step. What was sent is a function of all G_k that saturates; descent from beliefs that
are nearly right (see `propagation`) finds them to the last digit.

A prior keeps signals from growing into what only chance separates. Each row has its own, as wide as its signals turn
out to be in all lines (sparse Bayesian learning: Tipping, 2001; of several signals at once: Wipf and Rao, 2007; here
through a function that is not linear, by Laplace's approximation). A row that no line needs shrinks to nothing.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradaudit.leakage.uneven.steps import AdamSteps

_LOOSE, _TIGHT, _EASED, _STUCK = 1e-3, 4.0, 1e-9, 1e6
"""Damping at first, by what it falls with success and grows without, and its bounds."""
_GAINED = 1e-3
"""Descent ends when no line gains this share."""
_LEAST = 1e-8
"""Smallest width of a prior, squared, in units of the optimizer's eps."""
_FREE = 0.2
"""Degrees of freedom that count as left at least, as a share of a line's entries: a fit that uses all has no error."""
_RIDGE = 1e-10
_AT_ONCE = 2**26
"""Numbers held at once of how lines change with signals (512 MiB): lines are taken by so many."""
_BY_LINE = ("signals", "spread", "slopes")


@dataclass(frozen=True)
class StepSignals:
    """Signals and how well they explain what was sent.

    Args:
        signals: [P, n, r] by base function of the steps, line and row, in units of the optimizer's eps.
        spread: [P, n, r] their variances.
        wide: [P, r] squared widths of the priors.
        fit: [n, d] what they make.
        slopes: [K, n, d] its derivatives by each step's gradient.
        left: [n] mean square of what they leave, per degree of freedom.
        cost: [n] squares left and prior, in units of errors.
    """

    signals: Tensor
    spread: Tensor
    wide: Tensor
    fit: Tensor
    slopes: Tensor
    left: Tensor
    cost: Tensor

    def lines(self, some: Tensor) -> "StepSignals":
        """Return some lines' signals."""
        own = {name: getattr(self, name)[:, some] for name in _BY_LINE}
        return replace(self, **own, fit=self.fit[some], left=self.left[some], cost=self.cost[some])

    def put(self, some: Tensor, new: "StepSignals") -> "StepSignals":
        """Return signals in which some lines are replaced."""
        held = {name: getattr(self, name).clone() for name in (*_BY_LINE, "fit", "left", "cost")}
        for name, value in held.items():
            value[(slice(None), some) if name in _BY_LINE else some] = getattr(new, name)
        return replace(self, **held)


class SignalFit:
    """Lines that are fitted.

    Args:
        sent: [n, d] what the steps took.
        error: [n, d] standard deviations.
        step: what takes gradients to what was sent, in units of eps.
        times: [P, K] how signals may change from step to step.
    """

    def __init__(self, sent: Tensor, error: Tensor, step: AdamSteps, times: Tensor) -> None:
        self.sent, self.error, self.step, self.times = sent, error, step, times

    def lines(self, some: Tensor) -> "SignalFit":
        """Return some lines' fit."""
        return SignalFit(self.sent[some], self.error[some], self.step, self.times)

    def gradients(self, signals: Tensor, rows: Tensor) -> Tensor:
        """Return [K, n, d] each step's gradient."""
        return torch.einsum("pk,pnr,rd->knd", self.times, signals, rows)

    def settled(self, start: StepSignals, rows: Tensor, turns: int, tries: int) -> StepSignals:
        """Return signals with priors and errors learned from them, turn by turn.

        Args:
            start: signals, priors and what is left to start from.
            rows: [r, d].
            turns: of learning.
            tries: steps of descent each.
        """
        found = start
        for _ in range(turns):
            found = self.descended(found, rows, tries)
            wide = (found.signals.square() + found.spread).mean(1).clamp_min(_LEAST)
            used = (1 - found.spread / wide[:, None]).clamp(0, 1).sum((0, 2))
            free = (self.sent.shape[1] - used).clamp_min(_FREE * self.sent.shape[1])
            left = (self.sent - found.fit).square().sum(1) / free
            found = replace(found, wide=wide, left=left)
        return found

    def descended(self, start: StepSignals, rows: Tensor, tries: int) -> StepSignals:
        """Return signals after damped Gauss-Newton steps, each line by itself."""
        most = max(_AT_ONCE // (start.wide.numel() * rows.shape[1]), 1)
        parts = torch.split(torch.arange(len(self.sent), device=rows.device), most)
        found = start if len(parts) > 1 else self._descended(start, rows, tries)
        for some in parts if len(parts) > 1 else ():
            found = found.put(some, self.lines(some)._descended(start.lines(some), rows, tries))
        return found

    def _descended(self, start: StepSignals, rows: Tensor, tries: int) -> StepSignals:
        weights = 1 / (self.error.square() + start.left[:, None])
        signals, prior = start.signals, 1 / start.wide.flatten()
        count, n, r = signals.shape
        damping = torch.full((n,), _LOOSE, dtype=rows.dtype, device=rows.device)
        fit, slopes, cost = self._cost(signals, rows, weights, start.wide)
        normal, scale = None, None
        for _ in range(tries):
            by_base = torch.einsum("pk,knd->pnd", self.times, slopes)
            rise = torch.einsum("pnd,rd->nprd", by_base, rows).reshape(n, count * r, -1)
            weighed = rise * weights[:, None]
            pull = (weighed @ (self.sent - fit)[..., None])[..., 0] - prior * signals.transpose(0, 1).reshape(n, -1)
            normal = weighed @ rise.mT + torch.diag(prior)
            scale = normal.diagonal(dim1=1, dim2=2).rsqrt()
            normal = normal * scale[:, :, None] * scale[:, None, :]
            damped = normal + torch.diag_embed((damping[:, None] + _RIDGE).expand(n, count * r))
            move = torch.cholesky_solve((pull * scale)[..., None], torch.linalg.cholesky(damped))[..., 0] * scale
            tried = signals + move.reshape(n, count, r).transpose(0, 1)
            new_fit, new_slopes, new = self._cost(tried, rows, weights, start.wide)
            better = new < cost
            gained = bool(((cost - new) > _GAINED * cost).any())
            signals = torch.where(better[None, :, None], tried, signals)
            fit = torch.where(better[:, None], new_fit, fit)
            slopes = torch.where(better[None, :, None], new_slopes, slopes)
            cost = torch.where(better, new, cost)
            damping = torch.where(better, damping / _TIGHT, damping * _TIGHT).clamp(_EASED, _STUCK)
            if not gained and bool(better.all()):
                break
        assert normal is not None
        assert scale is not None
        firm = normal + _RIDGE * torch.eye(count * r, dtype=rows.dtype, device=rows.device)
        spread = torch.cholesky_inverse(torch.linalg.cholesky(firm)).diagonal(dim1=1, dim2=2) * scale.square()
        spread = spread.reshape(n, count, r).transpose(0, 1)
        return replace(start, signals=signals, spread=spread, fit=fit, slopes=slopes, cost=cost)

    def _cost(self, signals: Tensor, rows: Tensor, weights: Tensor, wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fit, slopes = self.step.taken(self.gradients(signals, rows))
        off = (weights * (self.sent - fit).square()).sum(1)
        return fit, slopes, off + (signals.square() / wide[:, None]).sum((0, 2))
