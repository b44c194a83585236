"""Words, and the step each was in, from what AdamW made of the word embedding's rows over several steps.

A row of the word embedding has a gradient only at steps whose minibatch holds its token. Decay alone leaves a known
number, bit by bit, so every other row was in the data. And a row goes on moving behind its gradient: of one gradient g
at step k Adam makes, by the last step, C_k sign(g) in the whole, with

    C_k = sum over j >= k of rate_j * [b1^(j-k) (1 - b1) / (1 - b1^j)] / sqrt(b2^(j-k) (1 - b2) / (1 - b2^j))

which is another number for every k. Of two gradients the entries of a row lie where the ratio of the two puts them; how
often each ratio comes is nearly that of two independent Gaussians.
"""

import math
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from gradaudit.leakage.uneven.entries import grid
from gradaudit.models.local_steps import WEIGHTS
from gradaudit.types import LocalTraining, NamedWord, Observation

_MOST_STEPS, _MOST_DECAYS = 64, 4096
"""More steps than the first are not told apart; decay is not followed through more than the second."""
_RATIOS = torch.logspace(-1.3, 1.3, 27)
"""Sizes of the second gradient in those of the first that are tried: steps of 26 percent."""
_ALIKE = torch.tensor([-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9])
"""Correlations of two gradients of one word that are tried."""
_ANGLES, _POINTS = 4096, 96
"""Ratios at which a pair's move is computed, even in angle; quantiles by which laws and rows are compared."""
_PAIRS = 64
"""Pairs compared together: bounds memory."""
_LARGEST, _SCALES = 1e5, 33
"""Sizes of gradients that are tried, in eps: from ten to this."""
_KEPT, _BINS, _FLOOR = 400, 256, 0.05
"""Laws whose likelihood is computed from draws, its bins, and what an empty bin counts."""
_CLOSER, _FINE, _EMPTY = 48, 512, 1e-6
"""Pairs whose likelihood is computed from the density of ratios, at sizes and correlations near the first ones'; its
bins, and what an empty one counts: of 221 pairs of 64 steps 186 were right by draws alone."""
_NEAR_RATIO, _NEAR_ALIKE = 2, 3
"""So many steps to both sides, of 12 percent and of 0.1."""
_OFF = 6.0
"""A row so many standard deviations less likely than its law's own rows was in more steps than two (MiniLM, CoLA, 64
steps: 97% of pairs lie above, two thirds of the others below)."""
_OVER = 2.0
"""Rounding moves an entry by at most so many grid steps, times the root of the steps taken (measured after 64 steps:
0.5 in rows of one gradient, over 1,000 in those of two that come as near)."""
_TINY = 1e-12
"""Eps as a share of a gradient of which nothing but the sign counts."""
_ALONE = 0.01
"""Nearer to its law, in shares of the law's mean, a row had one gradient."""


def moved(how: LocalTraining, rates: Sequence[float], gradients: dict[int, Tensor]) -> Tensor:
    """Return how far AdamW moves entries whose gradients at some steps are these, and 0 at all others.

    Args:
        how: for betas, eps and decay.
        rates: learning rate of each step.
        gradients: by step, counted from 0; all of one shape.
    """
    one = next(iter(gradients.values()))
    first, second, found = torch.zeros_like(one), torch.zeros_like(one), torch.zeros_like(one)
    b1, b2 = how.betas
    for step, rate in enumerate(rates):
        g = gradients.get(step, torch.zeros_like(one))
        first, second = b1 * first + (1 - b1) * g, b2 * second + (1 - b2) * g.square()
        size = (second / (1 - b2 ** (step + 1))).sqrt() + how.eps
        found = found * (1 - rate * how.weight_decay) - rate * first / (1 - b1 ** (step + 1)) / size
    return found


def beyond_decay(seen: Observation, group: str, rates: Sequence[float]) -> Tensor | None:
    """Return how far rows of an embedding moved beyond decay, [V, d] float64, 0 where rounding may be all of it.

    Args:
        seen: the observation.
        group: "word" or "position".
        rates: learning rate of each step.

    Returns:
        None where it was not seen.
    """
    names = [name for name in seen.model.group(group) if name in seen.tensors]
    if not names or seen.knowledge.training is None:
        return None
    before = seen.model.parameters()[names[0]].detach()
    kind = WEIGHTS.get(seen.knowledge.training.precision, before.dtype)
    after = (before + seen.tensors[names[0]]).to(kind)
    before = before.to(kind)
    kept = before.clone()
    for rate in rates:
        kept.mul_(1 - rate * seen.knowledge.training.weight_decay)
    rest = after.double() - kept.double()
    # what was sent is a difference of weights: put back, it rounds once more
    moved = (rest.abs() > 2 * grid(before)).any(1, keepdim=True)
    return torch.where(moved, rest, torch.zeros_like(rest))


def read_words(seen: Observation) -> tuple[NamedWord, ...] | None:
    """Return the words of a weight change of AdamW with the steps each was in; None where it does not show them.

    Args:
        seen: the observation.
    """
    known = seen.knowledge
    how, steps = known.training, known.steps
    if seen.kind != "delta" or how is None or how.optimizer != "adamw" or known.defenses:
        return None
    if steps is None or steps > _MOST_DECAYS:
        return None
    rates = how.rates(steps)
    rest = beyond_decay(seen, "word", rates)
    if rest is None:
        return None
    ids = torch.where((rest != 0).any(1))[0]
    if not 0 < len(ids) <= len(rest) // 2:
        return None
    if steps > _MOST_STEPS or how.epochs > 1:
        return tuple(NamedWord(token, None) for token in ids.tolist())
    before = seen.model.parameters()[seen.model.group("word")[0]].detach()[ids]
    told = _told(how, rates, rest[ids].abs().cpu(), grid(before).double().cpu())
    return tuple(NamedWord(token, where) for token, where in zip(ids.tolist(), told, strict=True))


def _told(how: LocalTraining, rates: Sequence[float], sizes: Tensor, grids: Tensor) -> list[tuple[int, ...] | None]:
    """Return the steps that each row was in, as its entries' sizes [n, d] tell; None for more than two.

    Args:
        how: the training.
        rates: learning rate of each step.
        sizes: of the rows' moves.
        grids: [n, d] distance of neighboring numbers at each entry's weight.
    """
    steps, scales, off = _nearest_step(how, rates, sizes)
    # one gradient moves no entry further than its sign: a second one in the last steps, at small rates, adds a little
    sign = torch.full((1,), how.eps / _TINY, dtype=torch.double)
    furthest = torch.stack([moved(how, rates, {step: sign}).abs()[0] for step in range(len(rates))])
    over = (sizes - furthest[steps.cpu()][:, None]) / (grids * math.sqrt(len(rates)))
    alone = (off < _ALONE) & (over.amax(1) < _OVER)
    found: list[tuple[int, ...] | None] = [(step,) for step in steps.tolist()]
    scale = float(scales[alone].median()) if bool(alone.any()) else how.eps * _LARGEST
    others = torch.where(~alone)[0]
    if len(others) and len(rates) > 1:
        for row, pair in zip(others.tolist(), _pairs_of(how, rates, sizes[others].float(), scale), strict=True):
            found[row] = pair
    return found


def _nearest_step(how: LocalTraining, rates: Sequence[float], sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the step of rows [n, d] of one gradient each, that gradient's size, and how far off the row is, in shares.

    Eps takes a little off C_k: the less, the larger the gradient.

    Entries of a gradient are taken for Gaussian; their size is one of a grid.
    """
    places = (torch.arange(_POINTS, dtype=torch.double) + 0.5) / _POINTS
    normal = math.sqrt(2) * torch.erfinv(places)
    scales = how.eps * torch.logspace(1, math.log10(_LARGEST), _SCALES, dtype=torch.double)
    drawn = scales[:, None] * normal
    laws = torch.cat([moved(how, rates, {k: drawn}).abs() for k in range(len(rates))]).to(sizes)
    near = (torch.cdist(_quantiles(sizes), laws, p=1.0) / (_POINTS * laws.mean(1))).min(1)
    return near.indices // _SCALES, scales[near.indices.cpu() % _SCALES], near.values


def _pairs_of(how: LocalTraining, rates: Sequence[float], sizes: Tensor, scale: float) -> list[tuple[int, int] | None]:
    """Return the pair of steps that rows [n, d] of two gradients each were in; None where no pair comes near.

    Entries of two gradients are taken for Gaussians, of which only the ratio counts: a Cauchy variable, moved by what
    they have in common. Quantiles choose some laws, and the likelihood of all entries one of them: an entry is largest
    at one ratio, near which many lie, so that densities have edges which tell pairs apart.

    Args:
        how: the training.
        rates: learning rate of each step.
        sizes: float32.
        scale: of a gradient.
    """
    angle = math.pi * ((torch.arange(_ANGLES, dtype=torch.double) + 0.5) / _ANGLES - 0.5)
    first, second = scale * torch.cos(angle), scale * torch.sin(angle)
    places = torch.tan(math.pi * ((torch.arange(2 * _POINTS) + 0.5) / (2 * _POINTS) - 0.5))
    drawn = _RATIOS[:, None, None] * (_ALIKE[:, None] + (1 - _ALIKE.square()).sqrt()[:, None] * places)
    index = ((torch.atan(drawn) / math.pi + 0.5) * _ANGLES).long().clamp(0, _ANGLES - 1).flatten(0, 1)
    pairs = list(combinations(range(len(rates)), 2))
    rows = _quantiles(sizes)
    best: list[Tensor] = []
    which: list[Tensor] = []
    curves: list[Tensor] = []
    for start in range(0, len(pairs), _PAIRS):
        some = pairs[start : start + _PAIRS]
        curve = torch.stack([moved(how, rates, {k: first, m: second}).abs() for k, m in some]).float()
        laws = curve[:, index].sort(-1).values.reshape(-1, _POINTS, 2).mean(-1)
        off = torch.cdist(rows, laws, p=1.0) / (_POINTS * laws.mean(1))
        near = off.topk(min(_KEPT, off.shape[1]), largest=False)
        best.append(near.values)
        which.append(near.indices + start * len(index))
        curves.append(curve)
    place = torch.cat(best, 1).topk(min(_KEPT, sum(b.shape[1] for b in best)), largest=False).indices
    law = torch.cat(which, 1).gather(1, place)
    curve, densities = torch.cat(curves), _densities(angle)
    found: list[tuple[int, int] | None] = []
    for own, row in zip(law, sizes, strict=True):
        at, likely = own // len(index), _likely(curve[own // len(index)].gather(1, index[own % len(index)]), row)
        first_of: dict[int, int] = {}
        for n in likely.argsort(descending=True).tolist():
            first_of.setdefault(int(at[n]), int(own[n] % len(index)))
        tried = []
        for pair, drawn_by in list(first_of.items())[:_CLOSER]:
            ratio, alike = divmod(drawn_by, len(_ALIKE))
            beside = densities[
                max(0, 2 * ratio - _NEAR_RATIO) : 2 * ratio + _NEAR_RATIO + 1,
                max(0, 3 * alike - _NEAR_ALIKE) : 3 * alike + _NEAR_ALIKE + 1,
            ]
            tried.append((*_finely(curve[pair].double(), beside.flatten(0, 1), row.double()), pair))
        _, unlikely, pair = max(tried)
        found.append(pairs[pair] if unlikely > -_OFF else None)
    return found


def _likely(laws: Tensor, row: Tensor) -> Tensor:
    """Return [n] the log likelihood of a row's entries [d] under each of some laws [n, draws]."""
    top = float(row.max()) * (1 + 2 / _BINS)
    bins = (laws / top * _BINS).long().clamp(max=_BINS)
    counts = torch.zeros(len(laws), _BINS + 1).scatter_add_(1, bins, torch.ones_like(laws))
    smooth = torch.nn.functional.avg_pool1d(counts[:, None], 3, stride=1, padding=1)[:, 0] + _FLOOR
    logs: Tensor = (smooth / smooth.sum(1, keepdim=True)).log()
    return logs[:, (row / top * _BINS).long()].sum(1)


def _densities(angle: Tensor) -> Tensor:
    """Return [R, C, A] how often two Gaussian gradients lie at each angle, by ratio of their sizes and correlation.

    Ratios and correlations are `_RATIOS` and `_ALIKE`, with one more between two of the former and two of the latter.
    """
    ratios = torch.logspace(float(_RATIOS[0].log10()), float(_RATIOS[-1].log10()), 2 * len(_RATIOS) - 1)
    alike = torch.linspace(float(_ALIKE[0]), float(_ALIKE[-1]), 3 * len(_ALIKE) - 2)
    r, c = ratios.double()[:, None, None], alike.double()[:, None]
    cos, sin = torch.cos(angle), torch.sin(angle)
    quadratic = r.square() * cos.square() - 2 * c * r * cos * sin + sin.square()
    dense = (r * (1 - c.square()).sqrt()) / quadratic
    return dense / dense.sum(2, keepdim=True)


def _finely(curve: Tensor, densities: Tensor, row: Tensor) -> tuple[float, float]:
    """Return how likely a pair of steps makes a row at the best of some densities, and how well for that.

    Args:
        curve: [A] how far each angle moves an entry.
        densities: [G, A] of the angles.
        row: [d] how far its entries moved.

    Returns:
        The log likelihood, and that less what the law's own rows have, in their standard deviations.
    """
    top = float(torch.maximum(row.max(), curve.max())) * (1 + _EMPTY)
    shares = torch.zeros(len(densities), _FINE, dtype=row.dtype, device=row.device)
    shares.index_add_(1, (curve / top * _FINE).long(), densities)
    shares = torch.nn.functional.avg_pool1d(shares[:, None], 3, stride=1, padding=1)[:, 0] + _EMPTY
    logs = (shares / shares.sum(1, keepdim=True)).log()
    found = logs[:, (row / top * _FINE).long()].sum(1)
    at = int(found.argmax())
    share = logs[at].exp()
    mean = share @ logs[at]
    spread = (share @ logs[at].square() - mean.square()).sqrt()
    off = (found[at] - len(row) * mean) / (math.sqrt(len(row)) * spread)
    return float(found[at]) + len(row) * math.log(_FINE / top), float(off)


def _quantiles(rows: Tensor) -> Tensor:
    """Return [n, points] quantiles of each row's entries."""
    points = (torch.arange(_POINTS, dtype=rows.dtype, device=rows.device) + 0.5) / _POINTS
    return torch.quantile(rows, points, dim=1).T
