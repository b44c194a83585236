"""Many guesses measured together: ranked by a share of each matrix first, the best of them in full."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradaudit.leakage.matching.layout import Layout
from gradaudit.leakage.matching.masks import Masks
from gradaudit.leakage.matching.objective import Objective
from gradaudit.leakage.matching.screening import Base, Beside, Heat
from gradaudit.progress import on_time

_ROWS = 3072
"""Token rows that go through the model together on a CPU: more gains nothing there."""
_BYTES_A_ROW = 1 << 20
"""Memory a token row takes on the way forth and back, generously, for a model of a few hundred wide; scaled by size."""


@dataclass
class Candidates:
    """What guesses of a batch are measured against; counts what that costs.

    Args:
        objective: the distance to the update.
        frame: slots of the batch.
        labels: [B, ...] labels or distributions in force.
        masks: dropout masks in force, None for none; of several, the mean of the distances under each.
        screen: rank on every so many-th row of each matrix first; 1 measures everything in full.
        together: guesses that go through the model together; 0 chooses by what is free.
    """

    objective: Objective
    frame: Layout
    labels: Tensor
    masks: tuple[Masks | None, ...] = (None,)
    screen: int = 8
    together: int = 0
    evaluations: int = field(default=0, init=False)

    @torch.no_grad()
    def measure(
        self, vectors: Tensor, mask: Tensor | None = None, row: int | None = None, beside: Beside = (), keep: int = 0
    ) -> Tensor:
        """Return the distance of each guess, [N], or of each pair of a sentence and what it stands beside.

        Args:
            vectors: [N, B, T, d], or [N, 1, T, d] with `row` and `beside`.
            mask: [N, B, T] where guesses differ in length; the frame's when None.
            row: the one sentence that the guesses are about; None for the whole batch.
            beside: with `row`, what the others add, and to which of the sentences.
            keep: only the best so many are asked for, found by a ranking (`screen`); others may come out infinite.
                0 for all.
        """
        pick = slice(None) if row is None else torch.tensor([row], device=vectors.device)
        labels = self.labels[pick]
        pairs = sum(len(which) for _, which in beside) if beside else len(vectors)
        narrow = keep > 0 and self.screen > 1 and pairs > keep
        heats = (Heat(4 * keep), Heat(keep))
        size = self.together or self._fitting(vectors)
        found = torch.full((pairs,), torch.inf, device=vectors.device, dtype=vectors.dtype)
        for at in range(0, len(vectors), size):
            on_time("the ranking of guesses")
            part = vectors[at : at + size]
            shown = self.frame.mask[pick] if mask is None else mask[at : at + size]
            targets = labels.expand(len(part), *labels.shape)
            under = [masks.only(pick) if masks is not None else None for masks in self.masks]
            others, places = _within(beside, at, len(part)) if beside else ((), slice(at, at + size))
            if narrow:
                found[places] = self.objective.best_of(part, shown, targets, under, others, self.screen, heats)
            elif others:
                found[places] = self.objective.beside(part, shown, targets, under, others)
            else:
                each = [self.objective(part, shown, targets, masks) for masks in under]
                found[places] = torch.stack(each).mean(0)
        self.evaluations += pairs * len(self.masks)
        return found

    def best(self, vectors: Tensor, keep: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the indices and distances of the best guesses, best first.

        Args:
            vectors: [N, B, T, d].
            keep: how many.
            mask: as `measure` has it.
        """
        values = self.measure(vectors, mask, keep=keep)
        order = values.argsort(stable=True)[:keep]
        return order, values[order]

    def lengths_of(self, ids: Tensor, pad: int) -> Tensor:
        """Return the mask of token guesses [..., B, T] in which padding ends a sentence."""
        return self.frame.mask & ((ids == pad) & ~self.frame.fixed).cumsum(-1).eq(0)

    def _fitting(self, vectors: Tensor) -> int:
        rows = vectors.shape[1] * vectors.shape[2] * len(self.masks)
        most = _ROWS
        if vectors.is_cuda:
            free, _ = torch.cuda.mem_get_info(vectors.device)
            most = max(_ROWS, int(free * 0.5 / (_BYTES_A_ROW * vectors.shape[-1] / 512)))
        return max(1, most // rows)


def _within(beside: Beside, start: int, count: int) -> tuple[Beside, Tensor]:
    """Return the pairs of so many sentences from a place on, counted from there, and which pairs of all they are."""
    found: list[tuple[Base, Tensor]] = []
    places, before = [], 0
    for base, which in beside:
        inside = (which >= start) & (which < start + count)
        if bool(inside.any()):
            found.append((base, which[inside] - start))
            places.append(before + torch.where(inside)[0])
        before += len(which)
    return found, torch.cat(places)


def permutations(still: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Return random orders of each sentence's free slots, [count, B, T] indices of positions.

    Args:
        still: [B, T] bool, slots that stay.
        count: how many.
        rng: draws them.
    """
    size, length = still.shape
    order = torch.arange(length).expand(count, size, length).clone()
    for row in range(size):
        free = torch.where(~still[row].cpu())[0]
        draws = torch.rand(count, len(free), generator=rng).argsort(1)
        order[:, row, free] = free[draws]
    return order.to(still.device)


def reordered(values: Tensor, order: Tensor) -> Tensor:
    """Return [B, T, ...] values in each of the [N, B, T] orders."""
    rows = torch.arange(values.shape[0], device=values.device)[None, :, None]
    return values[rows, order]
