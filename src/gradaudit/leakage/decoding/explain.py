"""Does a set of sentences explain a gradient: their labels, and the share of it that they leave unexplained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradaudit.leakage.decoding.agreement import apart, doubted
from gradaudit.leakage.decoding.assembly import Solved
from gradaudit.leakage.rowspace.deflation import Matrices, Remainder, matrices, sentence_gradient
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.models.base import TextModel
from gradaudit.types import Observation, Reconstruction

LITTLE = 1e-4
"""A batch that leaves this share of the gradient is all of it: right ones are at 1e-6."""
_OWN, _ROUNDING = 100.0, 1e-6
"""What a sentence sends must be so many times what all leave, or rounding, for it to be proven by itself."""


@dataclass(frozen=True)
class Explained:
    """How sentences explain a gradient.

    Args:
        labels: of each.
        left: norm of what all of them leave of it, relative to the whole.
        parts: norm of what each sends, relative to the whole: where that is hardly more than what is left, nothing
            tells whether it was this sentence.
    """

    labels: tuple[int, ...]
    left: float
    parts: tuple[float, ...]


def explain(model: TextModel, sentences: Sequence[tuple[int, ...]], left: Matrices, share: float) -> Explained:
    """Return how a batch of sentences explains a gradient, and under which labels.

    Least squares over every sentence's gradients under each label gives what each one contributes; the label whose
    gradient is nearest to that is taken. What is left then is rounding when nothing is missing and nothing is wrong.

    Args:
        model: the model, in evaluation mode.
        sentences: token ids.
        left: gradients by (block, role).
        share: weight of a sentence, 1 / B.
    """
    whole = _flat(left)
    labels = range(model.spec.labels)
    parts = [[_flat(sentence_gradient(model, s, y, left)) * share for y in labels] for s in sentences]
    columns = torch.stack([part for some in parts for part in some])
    weights = torch.linalg.pinv(columns @ columns.T, rtol=1e-10, hermitian=True) @ (columns @ whole)
    chosen, norms, rest = [], [], whole
    for at, some in enumerate(parts):
        options = torch.stack(some)
        fitted = weights[at * len(labels) : (at + 1) * len(labels)] @ options
        best = int((options - fitted).norm(dim=1).argmin())
        chosen.append(best)
        norms.append(float(options[best].norm()))
        rest = rest - options[best]
    size = max(float(whole.norm()), 1e-300)
    return Explained(tuple(chosen), float(rest.norm()) / size, tuple(norm / size for norm in norms))


def named(
    seen: Observation,
    sentences: Sequence[tuple[int, ...]],
    notes: Sequence[str],
    details: Mapping[str, Any],
    sent: Matrices | None = None,
) -> Reconstruction:
    """Return sentences with their labels, proven where they are all of the batch and make its gradient.

    Args:
        seen: an update.
        sentences: token ids.
        notes, details: of how they were found.
        sent: gradients that they must make; those of q, k and v of the first two blocks when None.
    """
    size = seen.knowledge.batch_size or len(sentences)
    notes, details = list(notes), dict(details)
    labels, certificates = None, ("likely",) * len(sentences)
    one_gradient = seen.kind == "gradient" and seen.model.spec.task == "classification"
    if (loaded := seen.model.spec.loaded) is not None:  # a gradient needs the model's output
        notes.append(f"likely and not proven: only the first {loaded} blocks of the model were loaded")
    elif one_gradient and sentences and len(sentences) == size:
        told = explain(seen.model, sentences, matrices(seen, 2) if sent is None else sent, 1 / size)
        details["unexplained"] = told.left
        if told.left < LITTLE:
            # a sentence that sends next to nothing would leave as little if it were another one
            sure = [part > _OWN * max(told.left, _ROUNDING) for part in told.parts]
            labels, certificates = told.labels, tuple("proven" if one else "likely" for one in sure)
            weights = torch.eye(seen.model.spec.labels)[list(labels)].div(size).tolist()
            against = apart(seen, sentences, weights, whole=True)
            certificates = tuple(doubted(certificates, against, notes))
            if not all(sure):
                notes.append(f"{sure.count(False)} sentences send too little to be told from others")
    return Reconstruction(tuple(sentences), labels, certificates, tuple(notes), details)


def taken_apart(
    seen: Observation,
    first: Span,
    left: Matrices,
    slopes: bool,
    solved: Sequence[Solved],
    guesses: Sequence[tuple[int, ...]],
    rest: Remainder,
) -> Reconstruction:
    """Return the sentences that were taken out of a gradient, how sure each is, and the guesses at the others.

    Args:
        seen: the gradient, dropout off.
        first: block 0's span.
        left: what they were taken out of.
        slopes: what comes back to tokens was looked at, where that is block 0 alone.
        solved, guesses, rest: from `assembly.solve`.
    """
    size = seen.knowledge.batch_size
    alone = all(layer == 0 for layer, _ in left)
    notes = []
    if alone and not slopes:
        notes.append("only block 0 was seen: sentences are put together from it and not checked in a deeper block")
    elif guesses or (size is not None and len(solved) < size):
        rank = rest.span(0).rank
        notes.append(f"{len(solved)} sentences fit; what is left of the gradient has rank {rank}")
        if rank == 0:
            notes.append("the others of the batch are copies of these, or send nothing")
    proven = [s for s in solved if s.proven]
    against = []
    if proven:
        whole = rest.span(0).rank == 0 and len(proven) == len(solved)
        against = apart(seen, [s.tokens for s in proven], [s.weights for s in proven], whole)
    certificates = ["proven" if s.proven else "likely" for s in solved] + ["guess"] * len(guesses)
    certificates = doubted(certificates, against, notes)
    told = [s.label for s in solved if s.label is not None]
    labels = tuple(told) if not guesses and len(told) == len(solved) else None
    sequences = (*(s.tokens for s in solved), *guesses)
    if alone and slopes and len(proven) < len(sequences):
        by_all = named(seen, sequences, notes, first.told(), left)
        if by_all.labels is not None:
            return by_all
    return Reconstruction(sequences, labels, tuple(certificates), tuple(notes), first.told())


def _flat(some: Matrices) -> Tensor:
    return torch.cat([g.flatten() for g in some.values()])
