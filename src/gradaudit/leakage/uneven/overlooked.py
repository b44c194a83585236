"""Which words at which positions what is left of a gradient speaks for, once most rows are known.

A direction that hides in the noise is no direction to a fit, but a word is one number of a dictionary of millions that
all entries of the right column speak for together. With the known rows held fixed, each line leaves residuals; a
candidate row x explains (x^T W r)^2 / x^T W' x of its squares, where W' is what the known rows leave of the weights W.
Dropout hardly matters: a masked row is nine tenths its clean one. Words that are missing stand far above the others
where the fit shows no direction of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.uneven.exact_rows import Masked
from gradaudit.leakage.uneven.least_squares import inverses, normal_matrices
from gradaudit.leakage.uneven.weighted import Weighted

_WORDS = 4096
"""Tokens compared together: bounds memory."""
_CLOSER = 64
"""Candidates whose every line is measured."""
_WAYS = 32
"""Directions of what is left by which they are chosen, the loudest."""
_RIDGE = 1e-12
_OWN = 1e-5
"""A word of which the known rows make all but this share has no part of its own, and gains nothing: float32 tells no
less."""


@dataclass(frozen=True)
class Candidate:
    """A word that may be missing.

    Args:
        gain: squared errors of a line that it explains, beside all known rows: 1 by chance.
        token: its id.
        position: 0-based.
    """

    gain: float
    token: int
    position: int


@torch.no_grad()
def loudest(
    fitting: Weighted, rows: Tensor, left: Tensor, floor: float, batches: Iterable[Tensor]
) -> list[tuple[float, int]]:
    """Return which rows explain most of what known rows leave, the best first: squared errors of a line, and which.

    Args:
        fitting: of the entries.
        rows: [r, d] that are known, in units of the columns.
        left: [n, r] their signals, settled at the floor.
        floor: added to each entry's error.
        batches: [c, d] rows that are compared, in units of the columns; numbered through.
    """
    fit = left @ rows
    weights = fitting.weights(fit, floor)
    inverse = inverses(normal_matrices(rows, weights), _RIDGE)
    pull = weights * (fitting.target - fit)
    # signals settle to a thousandth; what the rows still explain would count for words that are like them
    pull = pull - weights * ((inverse @ (pull @ rows.T)[..., None])[..., 0] @ rows)
    # one weight a line and one a column tell words apart well enough to choose those that are measured
    lines = weights.mean(1, keepdim=True).clamp_min(1e-300)
    mean = (weights / lines).mean(0)
    _, sizes, ways = torch.linalg.svd(pull / lines.sqrt(), full_matrices=False)
    ways = (ways[:_WAYS] * sizes[:_WAYS, None] / len(pull) ** 0.5).T.float()
    beside = torch.linalg.qr((rows * mean.sqrt()).T).Q.float() * mean.float().sqrt()[:, None]
    rough: list[tuple[float, int, Tensor]] = []
    done = 0
    for several in batches:
        x = several.float()
        size = x.square() @ mean.float()
        own = size - (x @ beside).square().sum(1)
        gains = torch.where(own > _OWN * size, (x @ ways).square().sum(1) / own, 0.0)
        best, at = gains.topk(min(_CLOSER, len(several)))
        rough += [(g, done + n, several[n]) for g, n in zip(best.tolist(), at.tolist(), strict=True)]
        rough = sorted(rough, key=lambda one: -one[0])[:_CLOSER]
        done += len(several)
    found = []
    for _, number, x in rough:
        cross = (weights * x) @ rows.T
        own = weights @ x.square() - torch.einsum("nr,nrs,ns->n", cross, inverse, cross)
        own = torch.where(own > _OWN * (weights @ x.square()), own, torch.inf)
        found.append((float(((pull @ x).square() / own).mean()), number))
    return sorted(found, reverse=True)


def overlooked(
    fitting: Weighted, masked: Masked, left: Tensor, floor: float, positions: Sequence[int], ids: Tensor
) -> list[Candidate]:
    """Return the words that explain most of what the rows leave, the best first; see `loudest`.

    Args:
        fitting: of the entries.
        masked: the rows that are known.
        left: [n, r] their signals, settled at the floor.
        floor: added to each entry's error.
        positions: looked at.
        ids: [V] tokens looked at.
    """
    rows = (_whole(masked, position, some) for position in positions for some in torch.split(ids, _WORDS))
    heard = loudest(fitting, masked.rows(), left, floor, rows)
    return [Candidate(gain, int(ids[at % len(ids)]), positions[at // len(ids)]) for gain, at in heard]


def _whole(masked: Masked, position: int, ids: Tensor) -> Tensor:
    """Return tokens' rows with nothing dropped out, in units of the columns, [n, d]."""
    clean = masked.inputs.clean(position, ids)
    return masked.inputs.inputs(clean, torch.ones_like(clean, dtype=torch.bool), masked.rate) / masked.columns
