"""Continuous optimization of a guess: word vectors, labels and dropout masks by Adam, all candidates at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradaudit.leakage.matching.masks import Masks
from gradaudit.progress import answering, track

Loss = Callable[[Tensor, Tensor], Tensor]
"""[N, B, T, d] word vectors and [N, B, ...] labels to [N] losses, with a graph."""


@dataclass(frozen=True)
class Schedule:
    """How a descent goes.

    Args:
        steps: Adam steps.
        learning_rate: at the first step.
        decay: factor on the learning rate every `decay_every` steps; 1 keeps it.
        decay_every: in steps.
        linear_to: steps after which a linearly falling rate reaches 0; 0 does not fall.
        weight_decay: AdamW's, also on masks; 0 is Adam.
        clip: largest norm of the vectors' gradient; 0 does not clip.
    """

    steps: int
    learning_rate: float
    decay: float = 1.0
    decay_every: int = 50
    linear_to: int = 0
    weight_decay: float = 0.0
    clip: float = 0.0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, 0-based."""
        if self.linear_to:
            return self.learning_rate * max(0.0, 1 - step / self.linear_to)
        return self.learning_rate * self.decay ** (step // self.decay_every)


@dataclass(frozen=True)
class Point:
    """Where a descent is.

    Args:
        embeddings: [N, B, T, d] word vectors.
        labels: [N, B, ...] labels or distributions in force there.
        loss: [N] loss there.
        evaluations: steps spent, all candidates counted.
        masks: dropout masks in force there, where they were kept.
    """

    embeddings: Tensor
    labels: Tensor
    loss: Tensor
    evaluations: int
    masks: list[Tensor] | None = None


class Descent:
    """Adam over word vectors, and labels and masks where they are learned.

    Args:
        start: [N, B, T, d] word vectors to start from.
        still: [B, T] or [N, B, T] bool, slots that stay as they start.
        labels: [N, B, ...] labels in force, or where learning starts: logits ("softmax") or shares ("clamp").
        learn: how labels are learned: None not at all; "softmax" as distributions (DLG, TAG, LAMP); "clamp" as numbers
            kept in [0, 1] (Grab).
        schedule: steps and rates.
        masks: dropout masks, learned beside the rest; None for none.
    """

    def __init__(
        self,
        start: Tensor,
        still: Tensor,
        labels: Tensor,
        learn: str | None,
        schedule: Schedule,
        masks: Masks | None = None,
    ) -> None:
        self._start = start.detach()
        self._still = (still if still.dim() == 3 else still[None])[..., None]
        self._free = start.detach().clone().requires_grad_()
        self._learn = learn
        self._labels = labels.detach().clone()
        if learn is not None:
            self._labels = self._labels.float().requires_grad_()
        self._masks = masks
        self._how = schedule
        self._optimizer: torch.optim.Optimizer | None = None
        self.done = 0
        """Steps made."""

    @property
    def labels(self) -> Tensor:
        """The labels or distributions in force."""
        if self._learn == "softmax":
            return self._labels.softmax(-1)
        return self._labels

    @property
    def vectors(self) -> Tensor:
        """The word vectors in force, without a graph."""
        return torch.where(self._still, self._start, self._free).detach()

    @torch.no_grad()
    def take_masks(self, values: list[Tensor]) -> None:
        """Put masks back that a point kept."""
        assert self._masks is not None
        for mask, value in zip(self._masks.variables(), values, strict=True):
            mask.copy_(value)

    @torch.no_grad()
    def put(self, vectors: Tensor) -> None:
        """Go on from other word vectors, with the optimizer's memory kept."""
        self._free.copy_(vectors)

    def step(self, loss: Loss, keep_masks: bool = False) -> Point:
        """Make one step; returns the point that was left, with a copy of its masks if wanted."""
        vectors = torch.where(self._still, self._start, self._free)
        labels = self.labels
        value = loss(vectors, labels)
        kept = [m.detach().clone() for m in self._masks.variables()] if keep_masks and self._masks is not None else None
        left = Point(vectors.detach(), labels.detach().clone(), value.detach(), len(value), kept)
        labels_wanted = [self._labels] if self._learn is not None else []
        wanted = [self._free, *labels_wanted, *(self._masks.variables() if self._masks is not None else [])]
        pull(value, wanted)
        if self._how.clip:
            torch.nn.utils.clip_grad_norm_([self._free], self._how.clip)
        if self._optimizer is None:  # masks are drawn in the first pass
            kind = torch.optim.AdamW if self._how.weight_decay else torch.optim.Adam
            self._optimizer = kind(wanted, lr=self._how.learning_rate, weight_decay=self._how.weight_decay)
        for group in self._optimizer.param_groups:
            group["lr"] = self._how.rate(self.done)
        self._optimizer.step()
        self.done += 1
        if self._learn == "clamp":
            self._labels.detach().clamp_(0, 1)
        if self._masks is not None:
            self._masks.clamp()
        return left


def pull(value: Tensor, wanted: Sequence[Tensor]) -> None:
    """Put the slopes of a sum where an optimizer finds them, zeros where a variable has none.

    Args:
        value: [N] what is summed.
        wanted: the variables.
    """
    slopes = torch.autograd.grad(value.sum(), wanted, allow_unused=True, materialize_grads=True)
    for variable, slope in zip(wanted, slopes, strict=True):
        variable.grad = slope


def minimize(descent: Descent, loss: Loss, steps: int, *, keep_best: bool, what: str) -> Point:
    """Make so many steps and return the last point, or the best of each candidate.

    Args:
        descent: where to start, and how.
        loss: what to minimize.
        steps: how many.
        keep_best: return the best iterate instead of the last (a candidate each), and leave the masks, which all
            share, as they were at the best of them.
        what: name for the progress bar.

    Raises:
        StoppedError: Ctrl-C, with the last point.
    """
    best: Point | None = None
    least = torch.inf
    masks: list[Tensor] | None = None

    @torch.no_grad()
    def end() -> Point:
        value = loss(descent.vectors, descent.labels)
        return Point(descent.vectors, descent.labels.detach().clone(), value, (descent.done + 1) * len(value))

    with answering(lambda _: end()):
        for _ in track(range(steps), what):
            left = descent.step(loss, keep_masks=keep_best)
            if float(left.loss.min()) < least:
                least, masks = float(left.loss.min()), left.masks
            best = better(best, left)
    last = end()
    chosen = better(best, last) if keep_best else last
    if masks is not None and not float(last.loss.min()) < least:
        descent.take_masks(masks)
    return replace(chosen, evaluations=last.evaluations)


def better(best: Point | None, new: Point) -> Point:
    """Return the better of two points, candidate by candidate."""
    if best is None:
        return new
    wins = (new.loss < best.loss) | best.loss.isnan()  # what diverged is worse than anything

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(wins.view(-1, *[1] * (a.dim() - 1)), a, b)

    return Point(pick(new.embeddings, best.embeddings), pick(new.labels, best.labels), pick(new.loss, best.loss), 0)


def by_lbfgs(starts: Tensor, still: Tensor, labels: Tensor, learn: bool, loss: Loss, steps: int, *, what: str) -> Point:
    """Return where torch's L-BFGS ends from each start, one after the other: they share no curvature.

    Args:
        starts: [N, B, T, d] word vectors.
        still: [B, T] bool, slots that stay as they start.
        labels: [N, B, ...] labels in force, or logits of distributions to learn.
        learn: whether they are learned.
        loss: what to minimize.
        steps: of the optimizer, each of up to 20 evaluations (its default).
        what: name for the progress bar.
    """
    ends = [
        _one_by_lbfgs(s[None], still, y[None], learn, loss, steps, what) for s, y in zip(starts, labels, strict=True)
    ]
    return Point(
        torch.cat([p.embeddings for p in ends]),
        torch.cat([p.labels for p in ends]),
        torch.cat([p.loss for p in ends]),
        sum(p.evaluations for p in ends),
    )


def _one_by_lbfgs(
    start: Tensor, still: Tensor, labels: Tensor, learn: bool, loss: Loss, steps: int, what: str
) -> Point:
    free, logits = start.detach().clone().requires_grad_(), labels.detach().clone()
    wanted = [free, logits.requires_grad_()] if learn else [free]
    optimizer: torch.optim.Optimizer = torch.optim.LBFGS(wanted)
    spent = 0

    def point() -> Point:
        vectors = torch.where(still[..., None], start, free)
        shown = logits.softmax(-1) if learn else logits
        return Point(vectors, shown, loss(vectors, shown), spent)

    def closure() -> float:
        nonlocal spent
        spent += 1
        value = point().loss
        pull(value, wanted)
        return float(value.detach().sum())

    @torch.no_grad()
    def end() -> Point:
        nonlocal spent
        spent += 1
        return point()

    with answering(lambda _: end()):
        for _ in track(range(steps), what):
            before = spent
            optimizer.step(closure)
            if spent - before <= 1:
                break  # flat to the optimizer: where it stands is where it stays
    return end()
