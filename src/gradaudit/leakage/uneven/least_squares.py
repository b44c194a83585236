"""Weighted least squares, one problem a line of the entries."""

import torch
from torch import Tensor

_LINES = 4_000_000
"""Numbers of weighted rows held together while lines are solved: bounds memory."""
_DEPENDENT = 1e-14
"""Smaller, relative to the largest, a diagonal is rounding."""


def normal_matrices(rows: Tensor, weights: Tensor) -> Tensor:
    """Return [n, r, r], rows diag(w_i) rows^T for each line w_i of the weights.

    Args:
        rows: [r, d].
        weights: [n, d].
    """
    r = len(rows)
    one, other = torch.triu_indices(r, r, device=rows.device)
    packed = weights @ (rows[one] * rows[other]).T
    place = torch.empty((r, r), dtype=torch.long, device=rows.device)
    place[one, other] = place[other, one] = torch.arange(len(one), device=rows.device)
    return packed.index_select(1, place.view(-1)).view(len(weights), r, r)


def inverses(matrices: Tensor, ridge: float) -> Tensor:
    """Return the inverses of normal matrices, each scaled to a diagonal of ones, to which the ridge is added.

    What a line says nothing of has an inverse of 0: all its entries may be bounds that hold.
    """
    size = matrices.diagonal(dim1=1, dim2=2)
    scale = torch.where(size > 0, size.clamp_min(torch.finfo(matrices.dtype).tiny).rsqrt(), 0.0)
    both = scale[:, :, None] * scale[:, None, :]
    scaled = matrices * both
    scaled.diagonal(dim1=1, dim2=2).add_(ridge)
    inverse: Tensor = torch.cholesky_inverse(torch.linalg.cholesky(scaled)) * both
    return inverse


def against(matrices: Tensor, pull: Tensor, ridge: float) -> Tensor:
    """Return what normal matrices [n, r, r] turn into a pull [n, r]; see `inverses`."""
    scale = matrices.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(matrices.dtype).tiny).rsqrt()
    scaled = matrices * scale[:, :, None] * scale[:, None, :]
    scaled.diagonal(dim1=1, dim2=2).add_(ridge)
    found = torch.cholesky_solve((pull * scale)[..., None], torch.linalg.cholesky(scaled))
    return found[..., 0] * scale


def solved(rows: Tensor, weights: Tensor, pull: Tensor) -> Tensor:
    """Return [n, r], the weighted least squares solution of left @ rows = target line by line.

    Args:
        rows: [r, d].
        weights: [n, d].
        pull: [n, d] weights times the target.
    """
    if not len(rows):
        return weights.new_zeros(len(weights), 0)
    # weights of a line differ by up to 1e16, which normal matrices would square
    root = weights.sqrt()
    target = pull / root.clamp_min(1e-300)
    parts = []
    for some in torch.split(torch.arange(len(root), device=root.device), max(1, _LINES // rows.numel())):
        q, t = torch.linalg.qr(root[some][:, :, None] * rows.T)
        # a row that the others make up has no part of its own: it gets nothing
        own = t.diagonal(dim1=1, dim2=2)
        own.masked_fill_(own.abs() <= _DEPENDENT * own.abs().amax(1, keepdim=True), float("inf"))
        parts.append(torch.linalg.solve_triangular(t, q.mT @ target[some][:, :, None], upper=True)[..., 0])
    return torch.cat(parts)
