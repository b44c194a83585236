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
"""Laws whose likelihood is computed, its bins, and what an empty bin counts."""
_OFF = 6.0
"""A row so many standard deviations less likely than its law's own rows was in more steps than two (MiniLM, CoLA, 16
and 64 steps: nearly all pairs lie above, half of the triples and most others below)."""
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
    kept = before.clone()
    for rate in rates:
        kept.mul_(1 - rate * seen.knowledge.training.weight_decay)
    after = before + seen.tensors[names[0]]
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
    told = _told(how, rates, rest[ids].abs().cpu())
    return tuple(NamedWord(token, where) for token, where in zip(ids.tolist(), told, strict=True))


def _told(how: LocalTraining, rates: Sequence[float], sizes: Tensor) -> list[tuple[int, ...] | None]:
    """Return the steps that each row was in, as its entries' sizes [n, d] tell; None for more than two."""
    steps, scales, off = _nearest_step(how, rates, sizes)
    alone = off < _ALONE
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
    curve = torch.cat(curves)
    found: list[tuple[int, int] | None] = []
    for own, row in zip(law, sizes, strict=True):
        at, unlikely = _likeliest(curve[own // len(index)].gather(1, index[own % len(index)]), row)
        found.append(pairs[int(own[at]) // len(index)] if unlikely > -_OFF else None)
    return found


def _likeliest(laws: Tensor, row: Tensor) -> tuple[int, float]:
    """Return which of some laws [n, draws] makes a row's entries [d] likeliest, and how well it does.

    Returns:
        The law, and the log likelihood less what the law's own rows have, in their standard deviations.
    """
    top = float(row.max()) * (1 + 2 / _BINS)
    bins = (laws / top * _BINS).long().clamp(max=_BINS)
    counts = torch.zeros(len(laws), _BINS + 1).scatter_add_(1, bins, torch.ones_like(laws))
    smooth = torch.nn.functional.avg_pool1d(counts[:, None], 3, stride=1, padding=1)[:, 0] + _FLOOR
    logs = (smooth / smooth.sum(1, keepdim=True)).log()
    found = logs[:, (row / top * _BINS).long()].sum(1)
    at = int(found.argmax())
    share = counts[at] / counts[at].sum()
    mean = share @ logs[at]
    spread = (share @ logs[at].square() - mean.square()).sqrt()
    off = (found[at] - len(row) * mean) / (math.sqrt(len(row)) * spread)
    return at, float(off)


def _quantiles(rows: Tensor) -> Tensor:
    """Return [n, points] quantiles of each row's entries."""
    points = (torch.arange(_POINTS, dtype=rows.dtype, device=rows.device) + 0.5) / _POINTS
    return torch.quantile(rows, points, dim=1).T
