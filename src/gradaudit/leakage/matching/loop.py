"""The loop that DLG and TAG share: Gaussian starts, Adam or L-BFGS, nearest tokens at the end."""

from dataclasses import dataclass

import torch

from gradaudit.leakage.matching.descent import Descent, Point, Schedule, by_lbfgs, minimize
from gradaudit.leakage.matching.distances import Distance
from gradaudit.leakage.matching.layout import layout
from gradaudit.leakage.matching.replay import objective_of
from gradaudit.leakage.matching.start import FirstLabels, first_labels
from gradaudit.leakage.observed import nearest_tokens
from gradaudit.progress import answering
from gradaudit.types import Observation, Reconstruction


@dataclass(frozen=True)
class Matching:
    """How a guess is matched.

    Args:
        steps: of the optimizer.
        learning_rate: Adam's.
        start: deviation of the starts; 0 takes the word table's.
        restarts: independent starts, minimized together; the lowest distance wins.
        assumed_length: tokens a sentence when neither lengths nor position rows are known.
        keep_best: take the best iterate instead of the last.
        replayed_steps: local steps of a weight change replayed at most.
        lbfgs: torch's L-BFGS with its defaults in place of Adam, the starts in turn; steps are its own.
        learn_labels: learn labels even where they are given or can be read.
    """

    steps: int
    learning_rate: float
    start: float
    restarts: int
    assumed_length: int
    keep_best: bool
    replayed_steps: int
    lbfgs: bool
    learn_labels: bool


def match(seen: Observation, rng: torch.Generator, distance: Distance, how: Matching, what: str) -> Reconstruction:
    """Recover a batch by minimizing a distance between updates from Gaussian starts.

    Labels are used when given, read from the output layer where that is exact (`leakage.labels`), learned otherwise.

    Args:
        seen: the observation; knowledge must hold the batch size.
        rng: random stream of the starts.
        distance: between predicted and observed tensors.
        how: optimizer, starts and labels.
        what: name for the progress bar.

    Raises:
        StoppedError: Ctrl-C, with what the guess had come to.
    """
    objective = objective_of(seen, distance, how.replayed_steps)
    frame = layout(seen, how.assumed_length)
    model, table = seen.model, seen.model.word_vectors()
    shape = (how.restarts, *frame.ids.shape, table.shape[1])
    noise = torch.randn(shape, generator=rng).to(table) * (how.start or float(table.std()))
    first_vectors = torch.where(frame.fixed[None, :, :, None], table[frame.ids][None], noise)
    first = first_labels(seen, frame)
    learn = first.learned or how.learn_labels
    labels = _labels(first, how.restarts, learn, seen, rng)
    still = frame.still

    def loss(vectors: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return objective(vectors, frame.mask, targets)

    def told(found: Point) -> Reconstruction:
        best = int(found.loss.nan_to_num(nan=torch.inf).argmin())  # a start that diverged is not the best
        ids = nearest_tokens(found.embeddings[best], table, sorted(model.special.ids))
        ids = torch.where(frame.fixed, frame.ids, ids)
        labels_from = "learned" if learn else first.how
        return objective.told(
            frame.sequences(ids), found.labels[best], labels_from, float(found.loss[best]), found.evaluations
        )

    with answering(lambda had: had and told(had)):
        if how.lbfgs:
            return told(by_lbfgs(first_vectors, still, labels, learn, loss, how.steps, what=what))
        schedule = Schedule(how.steps, how.learning_rate)
        descent = Descent(first_vectors, still, labels, "softmax" if learn else None, schedule)
        return told(minimize(descent, loss, how.steps, keep_best=how.keep_best, what=what))


def _labels(first: FirstLabels, restarts: int, learn: bool, seen: Observation, rng: torch.Generator) -> torch.Tensor:
    """Return [restarts, B, ...] labels in force, or logits to start learning them from."""
    values = first.values
    if not learn:
        return values.expand(restarts, *values.shape)
    # text's own labels, a distribution over the vocabulary a position, start close to even
    scale = 0.01 if seen.model.spec.task == "causal-lm" else 1.0
    shape = (*values.shape, seen.model.spec.labels) if values.dim() == 1 else values.shape
    return scale * torch.randn((restarts, *shape), generator=rng).to(values.device)
