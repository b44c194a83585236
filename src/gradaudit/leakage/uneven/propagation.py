"""Which of many known rows several steps of Adam were made of, and what each row sent: expectation propagation.

The gradients of an entry are z_p = sum over rows of signals s_pr x_rd, parts p of which `times` makes each step's. What
was sent is one number y = f(z) an entry, and f saturates: y hardly says how large z is, and of two steps it leaves two
ratios open. A linear view of f at one point, as descent takes it, ends in wrong valleys. Here all z that
fit y count: a normal distribution, the entry's site, takes the place of f's likelihood, with the mean and covariance
that z has given y and all other entries (Minka, 2001). As others narrow what z can be, the entry says more.

Each row has a prior as wide as its signals turn out to be in all lines together (sparse Bayesian learning: Tipping,
2001; of several signals at once: Wipf and Rao, 2007), each line a size of its own: rows that no line needs shrink to
nothing, and a few hundred candidates are weighed at once. What f leaves counts as noise, learned from what it is; it
falls as the right rows come in. Entries that nothing explains yet are let be.
"""

import math

import torch
from torch import Tensor

from gradaudit.leakage.uneven.steps import AdamSteps

_POINTS, _FEWEST, _FAR = 400, 3, 3.2
"""Points at which an entry's likelihood is read, fewest a direction, and how many standard deviations they reach."""
MOST_PARTS = 6
"""Parts at most: 3^6 points an entry."""
_AT_ONCE = 2**21
"""Points that are held at once (16 MiB each of some tensors)."""
_NOISE, _FALL, _RISE = 0.3, 0.8, 1.1
"""What f leaves at first, as a share of a step, and by how much it may fall and rise in a turn: falling faster, entries
are believed that others would have corrected."""
_STRAY, _NEARLY = 0.05, 0.8
"""Density of an entry that nothing explains; the noise is what so large a share of the entries leaves at most."""
_LOOSE = 0.1
"""Share of the sites that stays where the search begins again."""
_DAMPED = 0.5
"""Share of the way that a site goes in a turn: all at once they overshoot."""
_NARROW = 1e-3
"""An entry whose cavity knows so much less than all do has no site taken off; and of a row that resembles
those held at least so much is its own."""
_LOUD = 4000
"""Rows that pull most, of which it is asked how much chance makes: of 98,000 the fortieth by chance is among them."""
_STEADY = 1e-4
"""Smallest squared width of a part, as a share of the first one's."""
_LEAST, _RIDGE, _DEAD = 1e-12, 1e-10, 1e-30
"""Smallest squares that are told from nothing, what makes matrices firm, and the smallest squared width of a row: it
falls from turn to turn, and would come to zero."""
_UNLEARNED = {True: 2, False: 12}
"""Turns at first in which priors stay, of tied parts and of others: before sites are there, nothing is to be
learned. Eight sentences of 66 words: in whole batches 66 found after 2 turns, 65 after 12; in minibatches 51, 56."""


class Propagation:
    """Beliefs about what known rows sent, line by line.

    Args:
        sent: [n, d] what the steps took.
        error: [n, d] standard deviations.
        step: what takes gradients to what was sent, in units of eps.
        times: [P, K] each step's share of each part; at most `MOST_PARTS` parts.
        tied: a row that sends in one part sends in all; else each part has rows of its own.
        rows: [r, d] candidates, of length sqrt(d).
    """

    def __init__(self, sent: Tensor, error: Tensor, step: AdamSteps, times: Tensor, tied: bool, rows: Tensor) -> None:
        self.sent, self.error, self.step, self.times, self.tied, self.rows = sent, error, step, times, tied, rows
        parts, (n, d) = len(times), sent.shape
        self.sites = sent.new_zeros(n, d, parts, parts)
        self.shifts = sent.new_zeros(n, d, parts)
        self.noise = torch.full_like(sent[:, 0], _NOISE)
        self.widths = sent.new_full((parts, len(rows)), 1 / len(rows))
        # a step falls short of its bound by 1 over the gradient
        size = 1 / (sent.abs().max() * (1 + _LEAST) - sent.abs().quantile(0.9, dim=1)).clamp_min(1e-6)
        share = torch.full_like(times[:, 0], 1.0 if not tied else 1e-2)
        share[0] = 1
        self.scales = size.square()[:, None, None] * torch.diag(share)
        self.turns = 0
        self._infer()

    def turn(self) -> None:
        """Update every entry's site, then the priors by what the rows turn out to send."""
        self._update()
        if self.turns >= _UNLEARNED[self.tied]:
            self._learn()
        self._infer()
        self.turns += 1

    def loosen(self) -> None:
        """Let go of most of what the entries said, and begin again as unsure as at first, with the rows as they are.

        Entries that went a wrong way while rows were missing are heard anew beside those that are there now.
        """
        self.sites, self.shifts = _LOOSE * self.sites, _LOOSE * self.shifts
        self.noise = torch.full_like(self.noise, _NOISE)
        self._infer()

    def signals(self) -> Tensor:
        """Return [P, n, r] what each row is believed to send."""
        return self.mean.movedim(1, 0)

    def strengths(self) -> Tensor:
        """Return [r] the squared errors that each row explains beside the others, summed over lines: of the part that
        shows most."""
        spread = self._own(self.spread)
        firm = spread * (1 - spread / self._prior()).clamp_min(_LEAST)
        return (self.mean.square() / firm).sum(0).amax(0)

    def gains(self, rows: Tensor) -> Tensor:
        """Return [V] the squared errors that each of other rows would explain of what is left; 0 of the quiet ones."""
        left = self.shifts - (self.sites @ self.gradients[..., None])[..., 0]
        size = self.scales.diagonal(dim1=1, dim2=2)
        parts, r = len(self.times), len(self.rows)
        best = rows.new_zeros(len(rows))
        for p in range(parts):
            pull = ((left[..., p] * size[:, None, p].sqrt()) @ rows.T).square().sum(0)
            loud = pull.topk(min(_LOUD, len(pull))).indices
            # float32: half of the time, and chance is not known to a thousandth
            known = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
            for line, site in enumerate(self.sites * size[:, p, None, None, None]):
                seen = torch.cat([self.rows * site[:, q, p] for q in range(parts)]).float()
                spread = (self.spread[line].reshape(parts * r, -1) / size[line, p]).float()
                known += torch.diag(site[:, p, p].float()) - seen.T @ (spread @ seen)
            heard = rows[loud].float()
            chance = ((heard @ known) * heard).sum(1) / len(self.sent)
            least = _NARROW * float(known.trace()) / len(self.sent)
            best[loud] = torch.maximum(best[loud], pull[loud] / chance.clamp_min(least))
        return best

    def exchange(self, kept: list[int], more: Tensor) -> None:
        """Go on with some of the rows, and with others of which nothing is known yet."""
        wide = self.widths[:, kept]
        fresh = wide.sort(dim=1).values[:, : max(len(kept) // 2, 1)].median(dim=1, keepdim=True).values
        self.widths = torch.cat([wide, fresh.expand(-1, len(more))], 1)
        self.rows = torch.cat([self.rows[kept], more])
        self._infer()

    def _prior(self) -> Tensor:
        """Return [n, P, r] how wide each row's signals are expected to be, squared."""
        return self.scales.diagonal(dim1=1, dim2=2)[:, :, None] * self.widths

    def _own(self, spread: Tensor) -> Tensor:
        """Return [n, P, r] each signal's own variance."""
        parts, r = self.widths.shape
        return spread.reshape(len(spread), parts * r, -1).diagonal(dim1=1, dim2=2).reshape(-1, parts, r)

    def _infer(self) -> None:
        """Find the posterior of signals and gradients, given sites and priors."""
        parts, r = self.widths.shape
        rows, n = self.rows, len(self.sent)
        inverse, scale = torch.linalg.inv(self.scales), self.widths.rsqrt()
        firm = rows.new_zeros(n, parts, r, parts, r)
        for p in range(parts):
            for q in range(p + 1):
                block = (rows * self.sites[:, None, :, p, q]) @ rows.T
                block.diagonal(dim1=1, dim2=2).add_(inverse[:, p, q, None] * scale[p] * scale[q])
                firm[:, p, :, q], firm[:, q, :, p] = block, block
        firm = firm.reshape(n, parts * r, parts * r)
        unit = firm.diagonal(dim1=1, dim2=2).rsqrt()
        firm = firm * unit[:, :, None] * unit[:, None, :]
        spread = torch.cholesky_inverse(_factor(firm)) * unit[:, :, None] * unit[:, None, :]
        pull = (self.shifts.mT @ rows.T).reshape(n, -1, 1)
        self.mean = (spread @ pull).reshape(n, parts, r)
        self.spread = spread.reshape(n, parts, r, parts, r)
        self.gradients = (self.mean @ rows).mT
        about = [[((self.spread[:, p, :, q] @ rows) * rows).sum(1) for q in range(parts)] for p in range(parts)]
        self.covariance = torch.stack([torch.stack(one, -1) for one in about], -1)

    def _learn(self) -> None:
        """Learn rows' priors and lines' sizes from what the signals are: half by expectation, half by fixed point."""
        scale, inverse = self.widths.rsqrt(), torch.linalg.inv(self.scales)
        mean = self.mean * scale
        parts = range(len(self.widths))
        about = torch.stack(
            [torch.stack([self.spread[:, p, :, q].diagonal(dim1=1, dim2=2) * scale[p] * scale[q] for q in parts], -1)
             for p in parts], -1,
        )  # fmt: skip
        seen = mean.movedim(1, 2)[..., :, None] * mean.movedim(1, 2)[..., None, :]
        sent, open_ = (inverse[:, None] * seen).sum(-1), (inverse[:, None] * about).sum(-1)
        if self.tied:
            sent, open_ = (x.mean(-1, keepdim=True).expand(-1, -1, len(parts)) for x in (sent, open_))
        known = (1 - open_).clamp_min(_LEAST).mean(0)
        fixed, expected = sent.mean(0) / known, (sent + open_).mean(0)
        grown = (fixed.clamp_min(_LEAST) * expected).sqrt()
        weight = known.mean(1)
        every = (seen + about) / (grown.sqrt()[..., :, None] * grown.sqrt()[..., None, :])
        lines = (every * weight[:, None, None]).sum(1) / weight.sum()
        if not self.tied:
            lines = torch.diag_embed(lines.diagonal(dim1=1, dim2=2).mean(1, keepdim=True).expand(-1, len(parts)))
        lines = lines + _STEADY * lines[:, :1, :1] * torch.eye(len(parts), dtype=lines.dtype, device=lines.device)
        wide = self.widths * grown.T
        size = wide.sum(1).mean()
        self.widths, self.scales = (wide / size).clamp_min(_DEAD), lines * size

    def _update(self) -> None:
        """Move each entry's site towards what the entry says, given what all others do (its cavity)."""
        firm = torch.linalg.inv(self.covariance)
        shift = (firm @ self.gradients[..., None])[..., 0]
        cavity = firm - self.sites
        lone = torch.linalg.eigvalsh(cavity)[..., 0] <= _NARROW * torch.linalg.eigvalsh(firm)[..., 0]
        cavity = torch.where(lone[..., None, None], firm, cavity)
        cavity_shift = torch.where(lone[..., None], shift, shift - self.shifts)
        covariance = torch.linalg.inv(cavity)
        covariance = (covariance + covariance.mT) / 2
        mean = (covariance @ cavity_shift[..., None])[..., 0]
        error = (self.error.square() + self.noise[:, None].square()).sqrt()
        mean, covariance, left = tilted(self.step, self.times, mean, covariance, self.sent, error)
        noise = left.quantile(_NEARLY, dim=1).sqrt()
        self.noise = torch.minimum(self.noise * _RISE, torch.maximum(noise, self.noise * _FALL))
        firm = torch.linalg.inv(covariance)
        site = firm - cavity
        size, axes = torch.linalg.eigh((site + site.mT) / 2)
        # an entry of two valleys may leave its gradient less known than before, which no site can say
        site = (axes * size.clamp_min(0)[..., None, :]) @ axes.mT
        shift = torch.where(
            (size < 0).any(-1, keepdim=True),
            (site @ mean[..., None])[..., 0],
            (firm @ mean[..., None])[..., 0] - cavity_shift,
        )
        self.sites = (1 - _DAMPED) * self.sites + _DAMPED * site
        self.shifts = (1 - _DAMPED) * self.shifts + _DAMPED * shift


def _factor(firm: Tensor) -> Tensor:
    """Return the Cholesky factors of matrices with a unit diagonal, made as firm as rounding asks for."""
    ridge = _RIDGE
    factor: Tensor
    firm.diagonal(dim1=1, dim2=2).add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(firm)
    while bool(failed.any()) and ridge < 1:
        ridge *= 100
        firm.diagonal(dim1=1, dim2=2).add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(firm)
    return factor


def tilted(
    step: AdamSteps, times: Tensor, mean: Tensor, covariance: Tensor, sent: Tensor, error: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and covariance of the parts of entries' gradients, given what was sent.

    The likelihood is read at a grid of points around what is known before, each standing for the cell about it; an
    entry that nothing there explains may be a stray.

    Args:
        step, times: see `Propagation`.
        mean, covariance: [..., P] and [..., P, P] what is known before, a normal distribution.
        sent, error: [...] what was sent, and its standard deviation.

    Returns:
        [..., P], [..., P, P], and [...] the square that is left of what was sent, where it is no stray.
    """
    parts = len(times)
    side = max(round(_POINTS ** (1 / parts)), _FEWEST)
    line = torch.linspace(-_FAR, _FAR, side, dtype=mean.dtype, device=mean.device)
    grid = torch.stack(torch.meshgrid([line] * parts, indexing="ij"), -1)
    cell, prior = float(line[1] - line[0]), -grid.square().sum(-1).flatten() / 2
    size, axes = torch.linalg.eigh(covariance.reshape(-1, parts, parts))
    # what rounding made negative is known
    points, root = grid.reshape(-1, parts), axes * size.clamp_min(_LEAST * float(size.max())).sqrt()[:, None, :]
    found = []
    for some in torch.split(torch.arange(len(root), device=mean.device), max(_AT_ONCE // len(points), 1)):
        at = mean.reshape(-1, parts)[some, None] + points @ root[some].mT
        made = step.sent(torch.einsum("pk,ngp->kng", times, at))
        steep = torch.gradient(made.reshape(len(some), *grid.shape[:-1]), dim=list(range(1, parts + 1)))
        # a cell stands for all that it holds: twice the variance that an even spread across it makes of a function
        room = error.flatten()[some, None].square() + sum(one.square().reshape(made.shape) for one in steep) / 6
        off = (sent.flatten()[some, None] - made).square()
        fits = -off / (2 * room) - room.log() / 2
        either = torch.logaddexp(fits, torch.full_like(fits, math.log(_STRAY)))
        weight = torch.softmax(either + prior, 1)
        fair = weight * (fits - either).exp()
        left = (fair * off).sum(1) / fair.sum(1).clamp_min(_LEAST)
        middle = weight @ points
        second = torch.einsum("ng,gp,gq->npq", weight, points, points) - middle[:, :, None] * middle[:, None, :]
        second.diagonal(dim1=1, dim2=2).add_(cell**2 / 12)
        moved = mean.reshape(-1, parts)[some] + (root[some] @ middle[..., None])[..., 0]
        found.append((moved, root[some] @ second @ root[some].mT, left))
    moved, spread, left = (torch.cat(one) for one in zip(*found, strict=True))
    return moved.reshape(mean.shape), spread.reshape(*mean.shape, parts), left.reshape(sent.shape)
