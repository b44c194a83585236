"""Which of the shared matrices is read, and the space of what enters it.

Of an optimizer's step, or behind little noise, each entry has an error of its own. The space is that of the low rank
which the entries carry, and what these errors make of right rows is taken off.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gradaudit.leakage.one_matrix.signal import Signal
from gradaudit.leakage.rowspace.subspace import Span, gap_rank, span
from gradaudit.leakage.uneven.entries import Entries, entries
from gradaudit.leakage.uneven.held import ReadBlock
from gradaudit.leakage.uneven.low_rank import started
from gradaudit.models.base import TextModel
from gradaudit.types import Observation

_AGREEING = 4
"""One head in so many has a direction for every token, the least. Of MiniLM's twelve nine or more have (blocks 0 to 4,
7 to 14 tokens, in development); one of block 0 looks past some tokens."""
_LOST, _DOUBTED, _BLUR = 0.03, 1e-3, 3.0
"""A direction of a fit that loses so much is none of the batch's, and one that loses the second may be none. The
batch's lose 4e-4 at most (SGD at 1e-3: 5e-3), those of noise 0.06 and more, and now and then one 3e-3 to 9e-3. Right
rows are apart by so many times what all directions lose: 1.2 to 1.7 times. MiniLM, AdamW at 5e-5 and 1e-5, SGD at 0.01
and 1e-3, blocks 0 to 4, in development."""


def signal_of(seen: Observation, rng: torch.Generator) -> tuple[Signal, ReadBlock | None] | None:
    """Return what the most telling of the shared matrices says; None where none holds rows of more than one token.

    The first block's tell most, for their rows depend least on the words around. In a block, q and v read the same and
    come first, then the feed-forward's first matrix; keys lack a direction; then the feed-forward's second matrix,
    whose input is far from the words. The attention's output, which reads no long sentences, is the last choice. A
    matrix without errors but rounding comes before all that have some.

    Args:
        seen: one gradient, or the weight change of one step.
        rng: draws the noise that errors are measured with.

    Returns:
        The space, and the entries with the low rank that holds it where each has an error of its own.
    """
    uneven: list[tuple[int, Entries]] = []
    for roles in ("qkv", "f", "p", "o"):
        for layer in range(seen.model.depth):
            some = entries(seen, layer, roles) if roles != "o" else None
            if some is not None:
                uneven.append((layer, some))
                continue
            exact = _values(seen, layer) if roles == "o" else _inputs(seen, layer, roles)
            if exact is not None and _tells(exact):
                return exact, None
    for layer, some in uneven:
        found = _fitted(seen, layer, some, rng)
        if found is not None and _tells(found[0]):
            return found
    return None


def _tells(signal: Signal) -> bool:
    """Say whether a space is that of several rows, and not everything."""
    return 1 < signal.rank < signal.basis.shape[1]


def _inputs(seen: Observation, layer: int, roles: str) -> Signal | None:
    """Return the space of what enters a matrix whose gradient was sent."""
    found = span(seen, layer, roles) if seen.kind == "gradient" else None
    if found is None:
        return None
    there = "".join(found.roles)
    return Signal(layer, there, found.basis[None], _differences(seen.model, there))


def _fitted(seen: Observation, layer: int, some: Entries, rng: torch.Generator) -> tuple[Signal, ReadBlock] | None:
    """Return the space of what enters a matrix of which each entry has an error."""
    found = fitted_span(seen, layer, some, rng)
    if found is None:
        return None
    fitted, block = found
    lost = fitted.lost
    assert lost is not None
    there = "".join(fitted.roles)
    basis, differences = fitted.basis[None].contiguous(), _differences(seen.model, there)
    blur, doubtful = _BLUR * float(lost.sum()), doubtful_directions(fitted)
    return Signal(layer, there, basis, differences, scale=fitted.scale, blur=blur, doubtful=doubtful), block


def fitted_span(seen: Observation, layer: int, some: Entries, rng: torch.Generator) -> tuple[Span, ReadBlock] | None:
    """Return what spans the inputs of a matrix of which each entry has an error, and the entries with their low rank.

    Args:
        seen: the update.
        layer: block.
        some: its entries.
        rng: draws the noise that errors are measured with.

    Returns:
        None where no low rank stands out. Directions that are none of the batch's are left out.
    """
    block = ReadBlock(seen.model, some, layer, started(seen.knowledge.batch_size), rng)
    fitted = block.span
    if fitted is None or fitted.lost is None:
        return None
    sure = fitted.lost < _LOST
    roles = tuple(role for _, role in block.keys)
    kept = replace(fitted, basis=fitted.basis[:, sure], rank=int(sure.sum()), lost=fitted.lost[sure], roles=roles)
    return kept, block


def doubtful_directions(inside: Span) -> int:
    """Return how many directions of a span may be of errors alone."""
    return 0 if inside.lost is None else int((inside.lost > _DOUBTED).sum())


def _differences(model: TextModel, roles: str) -> bool:
    """Say whether only differences of a sentence's rows are in the space."""
    return roles == "k" and model.absolute_positions


def _values(seen: Observation, layer: int) -> Signal | None:
    """Return the spaces of the values that enter an attention's output matrix, head by head.

    A head that looks past some tokens has fewer directions than there are tokens, and is left out.
    """
    sent = [g.detach().double() for g in seen.role(layer, "o") if bool(g.any())]
    if not sent or seen.kind != "gradient":
        return None
    width = seen.model.head_width
    columns = sent[0].view(len(sent[0]), -1, width).movedim(1, 0)  # [heads, out, width]
    _, values, vh = torch.linalg.svd(columns, full_matrices=False)
    precision = torch.finfo(next(iter(seen.tensors.values())).dtype).eps
    ranks = torch.tensor([gap_rank(one, precision)[0] for one in values])
    rank = int(ranks.sort(descending=True).values[max(0, len(ranks) // _AGREEING - 1)])
    heads = torch.where(ranks == rank)[0].to(vh.device)
    return Signal(layer, "o", vh[heads, :rank].mT.contiguous(), differences=False, heads=heads)
