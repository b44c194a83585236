"""Growing sentences of a decoder: which tokens may follow a prefix, by the span of a deeper block."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gradaudit.models.base import Past, TextModel

_ROWS = 4096
"""Candidate rows evaluated together: bounds memory, large enough to keep two cores busy."""
_LEAVES = 256
"""Candidates of one prefix in a run."""
_FLOAT = 4
_REMEMBERED = 2**29
"""Bytes of keys and values that are kept from one position to the next; more are made anew."""

Measures = Sequence[tuple[tuple[int, str], Callable[[Tensor], Tensor]]]
"""(block, role) of a matrix, and what takes its input rows [..., in] and returns [...]."""


class Attended:
    """Keys and values of growing prefixes: one whose beginning was asked for before is run by its last token alone.

    Args:
        model: a decoder.
        blocks: the first so many.
        start: position of a prefix's first token.
    """

    def __init__(self, model: TextModel, blocks: int, start: int = 0) -> None:
        self.model, self.start, self._blocks = model, start, blocks
        self._kept: dict[int, tuple[dict[tuple[int, ...], int], Past]] = {}

    def of(self, prefixes: Tensor) -> Past | None:
        """Return the keys and values of prefixes [P, t]; None where they are too many to be kept."""
        length = prefixes.shape[1]
        if length == 0:
            return ()
        if 2 * prefixes.numel() * self.model.width * self._blocks * _FLOAT > _REMEMBERED:
            self._kept.clear()
            return None
        rows = [tuple(row) for row in prefixes.tolist()]
        past = self._among(length, rows)
        if past is None:
            before = self._among(length - 1, [row[:-1] for row in rows])
            past = self._run(prefixes) if before is None else self._run(prefixes[:, -1:], before)
            self._kept[length] = ({row: at for at, row in enumerate(rows)}, past)
        self._kept = {at: kept for at, kept in self._kept.items() if at >= length - 1}
        return past

    def anew(self, prefixes: Tensor) -> Past:
        """Return the keys and values of prefixes without keeping them."""
        return self.model.attended(self._blocks, prefixes, self.start)

    def _among(self, length: int, rows: list[tuple[int, ...]]) -> Past | None:
        known, past = self._kept.get(length, ({}, ()))
        if not all(row in known for row in rows):
            return None
        at = [known[row] for row in rows]
        return [(keys[at], values[at]) for keys, values in past]

    def _run(self, ids: Tensor, before: Past = ()) -> Past:
        per_run = max(1, _ROWS // ids.shape[1])
        runs = [
            self.model.attended(
                self._blocks,
                ids[at : at + per_run],
                self.start,
                [(keys[at : at + per_run], values[at : at + per_run]) for keys, values in before],
            )
            for at in range(0, len(ids), per_run)
        ]
        return [(torch.cat([r[b][0] for r in runs]), torch.cat([r[b][1] for r in runs])) for b in range(self._blocks)]


def blocks_for(keys: Iterable[tuple[int, str]]) -> int:
    """Return how many blocks run for what enters some matrices, given as (block, role)."""
    return max(layer + (role not in "qkv") for layer, role in keys)


@torch.no_grad()
def leaf_values(attended: Attended, prefixes: Tensor, candidates: Tensor, measures: Measures) -> Tensor:
    """Return measures of what enters some matrices for every candidate as the next token of its prefix.

    All candidates follow their prefix in one sequence as leaves of a tree: each attends to the prefix and to itself
    and sits at the same position, so a prefix is run once and not once a candidate.

    Args:
        attended: what earlier positions' prefixes left, for as many blocks as the measures need, or more.
        prefixes: [P, t] token ids, t may be 0.
        candidates: [C] token ids, or each prefix's own, [P, C].
        measures: what is measured, and where.

    Returns:
        [measures, P, C].
    """
    candidates = candidates.expand(len(prefixes), -1)
    blocks = blocks_for(key for key, _ in measures)
    past = attended.of(prefixes)
    leaves = max(1, min(candidates.shape[1], _LEAVES))
    per_run = max(1, _ROWS // (prefixes.shape[1] + leaves))
    position, runs = attended.start + prefixes.shape[1], []
    for at in range(0, len(prefixes), per_run):
        some = slice(at, at + per_run)
        if past is None:
            behind = attended.anew(prefixes[some])
        else:
            behind = [(keys[some], values[some]) for keys, values in past]
        parts = torch.split(candidates[some], leaves, 1)
        rows = [_measured(attended.model, behind[:blocks], part, measures, position) for part in parts]
        runs.append(torch.cat(rows, 2))
    return torch.cat(runs, 1)


def _measured(model: TextModel, past: Past, candidates: Tensor, measures: Measures, position: int) -> Tensor:
    done = past[0][0].shape[2] if past else 0
    count, leaves = candidates.shape
    positions = torch.full_like(candidates, position)
    own = torch.eye(leaves, dtype=torch.bool, device=candidates.device)
    allowed = torch.cat([own.new_ones(leaves, done), own], 1).expand(count, -1, -1)
    inputs = model.matrix_inputs([key for key, _ in measures], candidates, positions, allowed, past)
    return torch.stack([measure(x) for (_, measure), x in zip(measures, inputs, strict=True)])


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
