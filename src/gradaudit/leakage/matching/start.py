"""What matching attacks start from: slots, labels and a pool of first guesses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.labels import known_labels
from gradaudit.leakage.matching.layout import Layout, layout
from gradaudit.leakage.rowspace.subspace import span
from gradaudit.types import Observation


@dataclass(frozen=True)
class FirstLabels:
    """Labels in force, or where learning them starts.

    Args:
        values: [B] classes, [B, C] shares, or (causal-lm) [B, T, V] shares.
        learned: whether they have to be learned.
        how: for the record.
    """

    values: Tensor
    learned: bool
    how: str


def frame_of(seen: Observation, assumed_length: int) -> Layout:
    """Return the slots an attacker can justify; one sentence's length is the rank of block 0 where that shows.

    Args:
        seen: the observation.
        assumed_length: tokens a sentence when nothing tells.
    """
    one_gradient = seen.kind == "gradient"  # every local step would add directions of its own
    known = seen.knowledge
    untold = known.lengths is None and known.longest is None
    if one_gradient and untold and known.batch_size == 1 and known.dropout:
        first = span(seen, 0)
        # with dropout on every row is one direction of its own
        if first is not None and first.rank < min(0.5 * seen.model.width, seen.model.max_length):
            assumed_length = first.rank
    return layout(seen, assumed_length)


def first_labels(seen: Observation, frame: Layout) -> FirstLabels:
    """Return labels that are given or can be read, or even shares to learn from."""
    size, length = frame.ids.shape
    model, device = seen.model, frame.ids.device
    if model.spec.task == "causal-lm":
        shares = torch.full((size, length, model.vocabulary_size), 1 / model.vocabulary_size, device=device)
        return FirstLabels(shares, True, "learned")
    values, how = known_labels(seen)
    if values is not None:
        return FirstLabels(values, False, how)
    return FirstLabels(torch.full((size, model.spec.labels), 1 / model.spec.labels, device=device), True, how)


def gaussian(frame: Layout, table: Tensor, norm: float, count: int, rng: torch.Generator) -> Tensor:
    """Return [count, B, T, d] Gaussian word vectors of one norm at free slots, special tokens at theirs.

    Args:
        frame: the slots.
        table: [V, d] word vectors.
        norm: of each vector.
        count: how many.
        rng: draws them.
    """
    noise = torch.randn((count, *frame.ids.shape, table.shape[1]), generator=rng).to(table)
    noise = torch.nn.functional.normalize(noise, dim=-1) * norm
    still = frame.still[None, :, :, None]
    return torch.where(still, table[frame.ids][None], noise)
