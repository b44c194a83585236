"""The loop that DLG and TAG share: one start, Adam, nearest tokens at the end."""

from __future__ import annotations

from typing import Any

import torch

from gradaudit.leakage.descent import Descent, Schedule, minimize
from gradaudit.leakage.distances import Distance
from gradaudit.leakage.labels import analytic_label
from gradaudit.leakage.layout import Layout, layout
from gradaudit.leakage.matching import Objective, nearest_tokens
from gradaudit.types import Observation, Reconstruction


def match(
    seen: Observation,
    rng: torch.Generator,
    distance: Distance,
    *,
    steps: int,
    learning_rate: float,
    restarts: int,
    assumed_length: int,
    keep_best: bool,
    what: str,
) -> Reconstruction:
    """Recover a batch by minimizing a distance between updates from Gaussian starts.

    Labels are used when given, read from the output layer where that is exact (`leakage.labels`), learned otherwise.

    Args:
        seen: the observation; knowledge must hold the batch size.
        rng: random stream of the starts.
        distance: between predicted and observed tensors.
        steps: Adam steps.
        learning_rate: Adam's.
        restarts: independent starts, minimized together; the lowest distance wins.
        assumed_length: tokens a sentence when neither lengths nor position rows are known.
        keep_best: take the best iterate instead of the last.
        what: name for the progress bar.
    """
    given_label = analytic_label(seen)
    objective = Objective(seen, distance)
    frame = layout(seen, assumed_length)
    model, table = seen.model, seen.model.word_vectors()
    shape = (restarts, *frame.ids.shape, table.shape[1])
    noise = torch.randn(shape, generator=rng).to(table)
    start = torch.where(frame.fixed[None, :, :, None], table[frame.ids][None], noise)
    labels, learn = _labels(seen, frame, given_label, restarts, rng)
    descent = Descent(
        start, frame.fixed | ~frame.mask, labels, "softmax" if learn else None, Schedule(steps, learning_rate)
    )
    found = minimize(
        descent, lambda vectors, targets: objective(vectors, frame.mask, targets), steps, keep_best=keep_best, what=what
    )
    best = int(found.loss.argmin())
    ids = nearest_tokens(found.embeddings[best], table, sorted(model.special.ids))
    ids = torch.where(frame.fixed, frame.ids, ids)
    details: dict[str, Any] = {
        "distance": float(found.loss[best]),
        "gradient_evaluations": found.evaluations,
        "matched_tensors": objective.tensors,
    }
    how, notes = seen.knowledge.training, []
    if seen.kind == "delta" and how is not None and how.steps(len(frame.ids)) > 1:
        notes.append(f"a weight change of {how.steps(len(frame.ids))} local steps was read as one gradient")
    classes: tuple[int, ...] | None = None
    if model.spec.task == "classification":
        final = found.labels[best]
        classes = tuple(int(y) for y in (final.argmax(-1) if final.dim() > 1 else final))
        details["labels"] = (
            "given" if seen.knowledge.labels is not None else ("learned" if learn else "read from the output layer")
        )
    return Reconstruction(sequences=frame.sequences(ids), labels=classes, notes=tuple(notes), details=details)


def _labels(
    seen: Observation, frame: Layout, single: int | None, restarts: int, rng: torch.Generator
) -> tuple[torch.Tensor, bool]:
    """Return [restarts, B] labels that are known, or starting logits to learn, and which of the two."""
    size, longest = frame.ids.shape
    device = frame.ids.device
    model, known = seen.model, seen.knowledge.labels
    if model.spec.task == "causal-lm":
        # the text is its own label: a distribution over the vocabulary a position, learned beside the vectors
        return 0.01 * torch.randn(restarts, size, longest, model.vocabulary_size, generator=rng).to(device), True
    if known is None and single is not None:
        known = (single,)
    if known is not None:
        return torch.tensor(known, device=device).expand(restarts, size), False
    return torch.randn(restarts, size, model.spec.labels, generator=rng).to(device), True
