"""What is answered of the words that the word embedding's rows name, each with the local steps that held it."""

from collections.abc import Sequence

import torch

from gradaudit.leakage.uneven.marks import marks_of, sentences_of
from gradaudit.types import NamedWord, Observation, Reconstruction


def named_by_step(seen: Observation, words: Sequence[NamedWord], rng: torch.Generator) -> Reconstruction:
    """Return words of several steps: each step's as sentences where embeddings tell, else in the order of their ids."""
    model, known, special = seen.model, seen.knowledge, seen.model.special
    size = (known.training.minibatch if known.training is not None else None) or known.batch_size
    steps = sorted({step for word in words for step in word.steps or ()})
    marks = marks_of(seen)
    guesses: list[tuple[int, ...]] = []
    ordered = False
    for step in steps:
        found = sentences_of(seen, marks, words, step, size, rng) if marks is not None and size is not None else []
        ordered |= bool(found)
        own = (w.token for w in words if w.steps == (step,) and w.token not in special.ids)
        guesses += found or [(*special.prefix, *own, *special.suffix)]
    guesses = [one[: model.max_length] for one in guesses]
    note = f"the word embedding's rows name {len(words)} words of the batch"
    if len(steps) > 1:
        note += f", the local steps of {sum(word.steps is not None for word in words)}"
    note += "; their order and sentences are guesses" if ordered else ", and no order"
    return Reconstruction(
        tuple(guesses),
        certificates=("guess",) * len(guesses),
        notes=(note,),
        details={"words": len(words)},
        words=tuple(words),
    )
