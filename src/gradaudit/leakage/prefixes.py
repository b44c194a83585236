"""Growing sentences of a decoder: which tokens may follow a prefix, by the span of a deeper block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradaudit.leakage.subspace import Span
from gradaudit.models.base import TextModel

_ROWS = 4096
"""Candidate rows evaluated together: bounds memory, large enough to keep two cores busy."""


@torch.no_grad()
def extension_residuals(model: TextModel, span: Span, prefixes: Tensor, candidates: Tensor, start: int = 0) -> Tensor:
    """Return the residual of every candidate as the next token of every prefix, [P, C].

    All candidates follow their prefix in one sequence as leaves of a tree: each attends to the prefix and to itself
    and sits at the same position, so a prefix is run once and not once a candidate.

    Args:
        model: a decoder.
        span: the span of the block whose inputs are tested (block 1 or deeper).
        prefixes: [P, t] token ids, t may be 0.
        candidates: [C] token ids.
        start: position of a prefix's first token, later than 0 where a batch was padded on the left.
    """
    each = candidates.expand(len(prefixes), -1)
    return leaf_values(model, prefixes, each, [((span.layer, "q"), span.residual)], start)[0]


@torch.no_grad()
def leaf_values(
    model: TextModel,
    prefixes: Tensor,
    candidates: Tensor,
    measures: Sequence[tuple[tuple[int, str], Callable[[Tensor], Tensor]]],
    start: int = 0,
) -> Tensor:
    """Return measures of what enters some matrices for every candidate after its prefix; see `extension_residuals`.

    Args:
        model: a decoder.
        prefixes: [P, t] token ids, t may be 0.
        candidates: [P, C] token ids, each prefix's own.
        measures: (block, role) of a matrix, and what takes its input rows [..., in] and returns [...].
        start: as there.

    Returns:
        [measures, P, C].
    """
    leaves = max(1, min(candidates.shape[1], 256))
    per_run = max(1, _ROWS // (prefixes.shape[1] + leaves))
    columns = []
    for part in torch.split(candidates, leaves, 1):
        pairs = zip(torch.split(prefixes, per_run), torch.split(part, per_run), strict=True)
        columns.append(torch.cat([_measured(model, *pair, measures, start) for pair in pairs], 1))
    return torch.cat(columns, 2)


def _measured(
    model: TextModel,
    prefixes: Tensor,
    candidates: Tensor,
    measures: Sequence[tuple[tuple[int, str], Callable[[Tensor], Tensor]]],
    start: int,
) -> Tensor:
    count, done = prefixes.shape
    ids = torch.cat([prefixes, candidates], 1)
    slot = torch.arange(ids.shape[1], device=ids.device)
    positions = (start + slot.clamp_max(done)).expand_as(ids)
    allowed = (slot[:, None] >= slot[None]) & (slot[None] < done) | (slot[:, None] == slot[None])
    inputs = model.matrix_inputs([key for key, _ in measures], ids, positions, allowed.expand(count, -1, -1))
    return torch.stack([measure(x[:, done:]) for (_, measure), x in zip(measures, inputs, strict=True)])


@torch.no_grad()
def last_inputs(model: TextModel, layer: int, sentences: Tensor) -> Tensor:
    """Return what enters a block at the last token of each sentence, [N, d].

    Args:
        model: a decoder.
        layer: block.
        sentences: [N, T] token ids, all of one length.
    """
    some = torch.split(sentences, max(1, _ROWS // sentences.shape[1]))
    return torch.cat([model.attention_inputs(layer, part)[:, -1] for part in some])


@torch.no_grad()
def prefix_residuals(model: TextModel, span: Span, sentence: list[int]) -> Tensor:
    """Return the residual of every position of one sentence in a span, [T]: one causal run tests every prefix."""
    device = span.basis.device
    return span.residual(model.attention_inputs(span.layer, torch.tensor([sentence], device=device)))[0]
