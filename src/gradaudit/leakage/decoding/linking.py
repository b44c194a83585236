"""From decoded tokens to sentences: the attention gradients say who attends to whom.

With X [b, d] known and of full rank, the gradient of W_q gives every query's signal D_q = dW_q X^+ (likewise keys), and
delta_q(i) = sum_j S_ij k_j per head, where S is zero outside a sentence. So the support of delta_q(i) in the keys, the
same for all heads, is the sentence of token i: sparse subspace clustering with a joint support. Attention dropout
changes S, not its support.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_JITTER, _REFINED = 1e-13, 2
"""Of the normal equations' mean diagonal: directions that say nothing stay where they are. And how often they are
solved, for what they leave: that takes off their squared condition."""


def joint_support(targets: Tensor, atoms: Tensor, positions: Tensor, steps: int = 20, ridge: float = 1e-4) -> Tensor:
    """Return [b, b] weights: how much atom j takes part in explaining target i, over all heads together.

    Reweighted minimum norm with one weight a pair (M-FOCUSS). A sentence has one token a position, so atoms at the
    target's own position, but for the target's own, are left out.

    Args:
        targets: [b, H, h] signals by head.
        atoms: [b, H, h] keys (or queries) by head.
        positions: [b] position of each token.
        steps: reweighting steps.
        ridge: regularization relative to the mean diagonal.
    """
    count, _, size = atoms.shape
    dictionary = atoms.permute(1, 2, 0)
    identity = torch.eye(size, dtype=atoms.dtype, device=atoms.device)
    own = torch.eye(count, dtype=torch.bool, device=atoms.device)
    weights = ((positions[:, None] != positions[None]) | own).to(atoms.dtype)
    unit = targets / targets.flatten(1).norm(dim=1).clamp_min(1e-300)[:, None, None]
    strength = atoms.norm(dim=2).mean(1)
    # products of two coordinates of an atom: half of them, the others are the same
    row, column = torch.triu_indices(size, size, device=atoms.device)
    place = torch.zeros(size, size, dtype=torch.long, device=atoms.device)
    place[row, column] = place[column, row] = torch.arange(len(row), device=atoms.device)
    outer = (dictionary[:, row] * dictionary[:, column]).permute(2, 0, 1).reshape(count, -1)
    for _ in range(steps):
        normal = (weights @ outer).view(count, -1, len(row))[:, :, place]
        diagonal = normal.diagonal(dim1=2, dim2=3).mean(2)
        solved = torch.linalg.solve(normal + ridge * diagonal[:, :, None, None] * identity, unit.unsqueeze(3)).squeeze(
            3
        )
        parts = weights[:, :, None] * torch.einsum("hdb,nhd->nbh", dictionary, solved)
        weights = parts.norm(dim=2) * strength
        weights = weights / weights.amax(1, keepdim=True).clamp_min(1e-300)
    return weights


def conditions(count: int, heads: int, size: int) -> int:
    """Return how many conditions the signals of a set of tokens meet that no choice of attention can bend.

    Args:
        count: tokens n of the set.
        heads: H.
        size: width h of a head: n (2 h + 1 - n) a head up to n = h, then h^2 + h however long the set.
    """
    bent = count**2 - max(0, count - size - 1) * max(0, count - size)
    return heads * (count * (2 * size + 1) - bent)


def unexplained(
    toward_queries: Tensor,
    toward_keys: Tensor,
    queries: Tensor,
    keys: Tensor,
    members: Tensor,
    hidden: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the share of each member's signals that attention among the members alone cannot make.

    Per head one matrix S [n, n] must explain both sides, delta_q = S k and delta_k = S^T q, and its rows sum to zero
    (the softmax ignores a shift, with dropout too). However long the set, q^T delta_q = delta_k^T k is h^2 conditions a
    head that no S can bend, so a set that leaves nothing unexplained exchanges attention with no other token: one
    stranger leaves about h / n (tests/test_linking.py measures it to n = 6 h). Least squares by the Sylvester equation
    S (k k^T) + (q q^T) S = delta_q k^T + q delta_k^T.

    Rows of the batch that were not decoded leak into the signals of those that were: each member's signals are off by
    a combination of the missing rows' signals, the same one at queries and keys and in all heads. With these `hidden`
    directions given, that combination is solved for as well (n q unknowns against `conditions`).

    Args:
        toward_queries: [b, H, h] signals at the queries.
        toward_keys: [b, H, h] signals at the keys.
        queries: [b, H, h].
        keys: [b, H, h].
        members: [n] indices of the set.
        hidden: [q, H, h] directions at the queries and at the keys that the missing rows' signals span.

    Returns:
        [n] the share that is left, and [n, q] the part of each hidden direction taken for each member's contamination.
    """
    count = len(members)
    side_q, side_k, q, k = (t[members].permute(1, 0, 2).double() for t in (toward_queries, toward_keys, queries, keys))
    # both sides at one scale, and the row sums as one more column of the keys
    scale_k, scale_q = (t.flatten(1).norm(dim=1)[:, None, None].clamp_min(1e-300) for t in (k, q))
    ones = torch.full_like(k[:, :, :1], count**-0.5)
    k, side_q = torch.cat([k / scale_k, ones], 2), torch.cat([side_q / scale_k, torch.zeros_like(ones)], 2)
    q, side_k = q / scale_q, side_k / scale_q
    along_k, turn_k = torch.linalg.eigh(k @ k.mT)
    along_q, turn_q = torch.linalg.eigh(q @ q.mT)
    both = along_q[:, :, None] + along_k[:, None]
    free = both < 1e-12 * both.amax((1, 2), keepdim=True)

    def remaining(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        right = turn_q.mT @ (one @ k.mT + q @ other.mT) @ turn_k
        exchanged = turn_q @ torch.where(free, torch.zeros_like(right), right / both) @ turn_k.mT
        return one - exchanged @ k, other - exchanged.mT @ q

    foreign = side_q.new_zeros((count, 0 if hidden is None else len(hidden[0])))
    left_q, left_k = remaining(side_q, side_k)
    if hidden is not None and foreign.numel():
        at_q = torch.nn.functional.pad(hidden[0].double().permute(1, 0, 2) / scale_k, (0, 1))
        at_k = hidden[1].double().permute(1, 0, 2) / scale_q
        ahead, behind = at_q @ k.mT @ turn_k, at_k @ q.mT @ turn_q
        own = torch.cat([at_q, at_k], 2).transpose(0, 1).flatten(1)
        made = _made(turn_q, turn_k, ahead, behind, torch.where(free, 0.0, 1 / both))
        solve = _solver(torch.kron(torch.eye(count).to(own), own @ own.T) - made)
        sides = ((side_q, at_q), (side_k, at_k))
        for _ in range(_REFINED):
            right = torch.einsum("hqd,hnd->nq", at_q, left_q) + torch.einsum("hqd,hnd->nq", at_k, left_k)
            foreign = foreign + solve(right.flatten()).view(foreign.shape)
            side_q, side_k = (side - torch.einsum("nq,hqd->hnd", foreign, at) for side, at in sides)
            left_q, left_k = remaining(side_q, side_k)
    left = left_q.square().sum((0, 2)) + left_k.square().sum((0, 2))
    whole = side_q.square().sum((0, 2)) + side_k.square().sum((0, 2))
    return (left / whole.clamp_min(1e-300)).sqrt(), foreign


def unexplained_queries(toward_queries: Tensor, keys: Tensor, members: Tensor) -> Tensor:
    """Return the share of each member's signal at its query that the members' own keys cannot make, [n].

    What comes back to a query's scores sums to zero, so that per head it lies in the span of n - 1 differences of keys,
    of h directions; with more tokens than that anything does.

    Args:
        toward_queries: [b, H, h] signals at the queries.
        keys: [b, H, h].
        members: [n] indices of the set.
    """
    signals, own = (t[members].double().transpose(0, 1) for t in (toward_queries, keys))
    basis = torch.linalg.qr((own[:, 1:] - own[:, :1]).mT).Q
    left = signals - (signals @ basis) @ basis.mT
    share: Tensor = left.square().sum((0, 2)) / signals.square().sum((0, 2)).clamp_min(1e-300)
    return share.sqrt()


def _made(turn_q: Tensor, turn_k: Tensor, ahead: Tensor, behind: Tensor, inverse: Tensor) -> Tensor:
    """Return [n q, n q], the products of what attention makes of each hidden direction at each member.

    That is a projection, so these less the products of the directions themselves are the normal equations of what it
    cannot make. Per head a product is one of two outer products [n, n], weighted by the Sylvester equation's inverse: a
    sum over one index of n, in place of the n (2 h + 1) entries of a column.

    Args:
        turn_q: [H, n, n] eigenvectors.
        turn_k: [H, n, n].
        ahead: [H, q, n] directions at queries by products with the keys, in eigenvectors.
        behind: [H, q, n] directions at keys by products with the queries.
        inverse: [H, n, n] of sums of eigenvalues; 0 where nothing is exchanged.
    """
    count, hidden = turn_q.shape[1], ahead.shape[1]
    side = torch.cat([ahead, behind], 2).transpose(0, 1).flatten(1)  # [q, H 2 n]
    halves = []
    for member in range(count):
        by_query, by_key = turn_q[:, member, None] * turn_q, turn_k[:, member, None] * turn_k  # [H, n, n]
        across = (turn_q[:, member, None] * behind) @ inverse  # [H, q, n]
        first = (by_query @ inverse)[:, :, None] * ahead[:, None] / 2 + turn_k[:, :, None] * across[:, None]
        second = (by_key @ inverse.mT)[:, :, None] * behind[:, None] / 2
        weighted = torch.cat([first, second], 3).permute(0, 3, 1, 2).flatten(2).flatten(0, 1)  # [H 2 n, n q]
        halves.append(side @ weighted)
    half = torch.cat(halves).view(count * hidden, -1)
    return half + half.T


def _solver(normal: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what solves normal equations [n, n] for a right side [n]; where columns depend on each other, for one."""
    jitter = _JITTER * normal.diagonal().mean()
    factor, failed = torch.linalg.cholesky_ex(normal + jitter * torch.eye(len(normal)).to(normal))
    if not int(failed):
        return lambda right: torch.cholesky_solve(right[:, None], factor)[:, 0]
    values, vectors = torch.linalg.eigh(normal)
    told = values > jitter
    inverse = torch.where(told, 1 / values, 0.0)
    return lambda right: vectors @ (inverse * (vectors.T @ right))


def group(affinity: Tensor, positions: Sequence[int], sentences: int) -> list[list[int]]:
    """Return the tokens of each sentence: the closest groups are joined first, never two tokens at one position.

    Average-link agglomeration down to `sentences` groups, or until no two groups may be joined.

    Args:
        affinity: [b, b] symmetric, at least 0.
        positions: position of each token.
        sentences: number of sentences.
    """
    total = affinity.double().cpu().clone()  # lists come out of it, one step after the other
    total.fill_diagonal_(0)
    count = len(positions)
    members: list[list[int]] = [[i] for i in range(count)]
    place = torch.tensor(positions)
    blocked = place[:, None] == place[None]
    size = torch.ones(count, dtype=torch.double)
    alive = count
    while alive > sentences:
        link = total / (size[:, None] * size[None])
        link[blocked] = -1
        best = int(link.argmax())
        a, b = divmod(best, count)
        if float(link[a, b]) < 0:
            break
        members[a] += members[b]
        members[b] = []
        total[a] += total[b]
        total[:, a] = total[a]
        total[a, a] = 0
        size[a] += size[b]
        blocked[a] |= blocked[b]
        blocked[:, a] = blocked[a]
        blocked[b] = True
        blocked[:, b] = True
        alive -= 1
    return [sorted(m, key=lambda i: positions[i]) for m in members if m]


def settled(
    groups: Sequence[list[int]], affinity: Tensor, positions: Sequence[int], ends: Sequence[bool], sentences: int
) -> list[list[int]]:
    """Return groups in which tokens that cannot stand where they were put stand at a place that is free elsewhere.

    That are those behind a sentence's last token, and those of the smallest of more groups than there are sentences:
    joining the closest first leaves some over. The one with the fewest places goes first, to the group it is closest
    to; one that fits nowhere stays alone.

    Args:
        groups: from `group`.
        affinity: [b, b] symmetric.
        positions: position of each token.
        ends: which tokens are a sentence's last.
        sentences: number of sentences.
    """
    kept: list[list[int]] = []
    loose: list[int] = []
    largest = sorted(range(len(groups)), key=lambda n: len(groups[n]), reverse=True)[:sentences]
    for n, members in enumerate(groups):
        last = [positions[i] for i in members if ends[i]]
        behind = [i for i in members if len(last) == 1 and positions[i] > last[0]]
        if n not in largest:
            loose += members
        else:  # where most of it lies behind, the last token is the one that is wrong
            moved = behind if 2 * len(behind) < len(members) else []
            kept.append([i for i in members if i not in moved])
            loose += moved

    def places(row: int) -> list[int]:
        here = positions[row]
        return [
            n
            for n, members in enumerate(kept)
            if all(positions[i] != here and (here < positions[i] or not ends[i]) for i in members)
            and not (ends[row] and any(ends[i] or positions[i] > here for i in members))
        ]

    alone = []
    while loose:
        row = min(loose, key=lambda i: len(places(i)) or len(kept) + 1)
        loose.remove(row)
        there = places(row)
        if there:
            kept[max(there, key=lambda n: float(affinity[row, kept[n]].mean()))].append(row)
        else:
            alone.append([row])
    return [*(sorted(m, key=lambda i: positions[i]) for m in kept), *alone]
