"""Words that the word embedding's own gradient names: a row that is not zero belongs to a token of the batch."""

import torch
from torch import Tensor

from gradaudit.types import Observation

_FROM_ALL = 0.5
"""More rows than this share of the vocabulary: a tied output layer, noise or weight decay touched them, not words."""
_SPARSE = 0.01
"""Zeros within the rows above this share: coordinates were left out or rounded away, and rows of words may be too."""


@torch.no_grad()
def words_of(seen: Observation) -> Tensor | None:
    """Return the ids of the batch's tokens, all of them and no others, where the word embedding's update tells them.

    Args:
        seen: the observation.

    Returns:
        [n] ids in ascending order; None where the rows were not shared, or are not those of the batch's words alone.
    """
    names = [name for name in seen.model.group("word") if name in seen.tensors]
    if not names:
        return None
    rows = seen.tensors[names[0]]
    touched = torch.where(rows.any(1))[0]
    if len(touched) == 0 or len(touched) > _FROM_ALL * len(rows):
        return None
    zeros = float((rows[touched] == 0).float().mean())
    return None if zeros > _SPARSE else touched
