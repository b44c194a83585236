"""The frame of a guess: how many sentences and positions, which slots hold known special tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.types import Observation


@dataclass(frozen=True)
class Layout:
    """Slots of a guess.

    Args:
        ids: [B, T] token ids of the fixed slots, padding elsewhere.
        mask: [B, T] bool, True where a slot holds a token.
        fixed: [B, T] bool, True where the token is known (the tokenizer's frame).
    """

    ids: Tensor
    mask: Tensor
    fixed: Tensor

    @property
    def still(self) -> Tensor:
        """[B, T] bool, slots that stay as they are: tokens that are known, and padding."""
        return self.fixed | ~self.mask

    def sequences(self, ids: Tensor) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each sentence of a [B, T] guess, without padding."""
        return tuple(tuple(row[keep].tolist()) for row, keep in zip(ids, self.mask, strict=True))


def longest_position(seen: Observation) -> int | None:
    """Return the length of the longest sentence where the position table's gradient shows it, else None.

    The gradient of an absolute position's row is zero exactly when no sentence reaches that position, and where next
    words are predicted, when none goes on behind it: there it is one position more.
    """
    unseen = 1 if seen.model.spec.task == "causal-lm" else 0
    for name in seen.model.group("position"):
        if name in seen.tensors:
            used = torch.where(seen.tensors[name].abs().sum(1) > 0)[0]
            first = seen.model.first_position_row
            if len(used) == 0 or len(used) >= seen.model.max_length:
                return None  # nothing was sent, or noise is on every row: it tells nothing
            return min(int(used[-1]) + 1 - first + unseen, seen.model.max_length)
    return None


def layout(seen: Observation, assumed_length: int) -> Layout:
    """Return the layout an attacker can justify from what it was given.

    Known lengths fix the frame's prefix and suffix in every sentence. Otherwise every sentence gets the longest
    length, where it was given or the position table shows it, or the assumed one, and only the prefix is fixed.

    Args:
        seen: the observation; its knowledge must hold the batch size.
        assumed_length: tokens a sentence, used when nothing tells.
    """
    size = seen.knowledge.batch_size
    assert size is not None
    lengths = seen.knowledge.lengths
    known = lengths is not None
    if lengths is None:
        lengths = (seen.knowledge.longest or longest_position(seen) or assumed_length,) * size
    special, longest = seen.model.special, min(max(lengths), seen.model.max_length)
    device = next(iter(seen.tensors.values())).device
    steps = torch.arange(longest, device=device)
    mask = steps[None] < torch.tensor(lengths, device=device)[:, None]
    ids = torch.full((size, longest), special.pad, device=device)
    fixed = torch.zeros_like(mask)
    for row, length in enumerate(lengths):
        suffix = special.suffix if known else ()
        if length < len(special.prefix) + len(suffix):
            continue
        for at, token in [*enumerate(special.prefix), *enumerate(suffix, length - len(suffix))]:
            ids[row, at], fixed[row, at] = token, True
    return Layout(ids=ids, mask=mask, fixed=fixed)
