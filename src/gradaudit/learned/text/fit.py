"""Fitting an inverter of text: what is shown and what is held out, who reads, and what word pairs add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradaudit.errors import BadInputError
from gradaudit.learned.manifest import Target
from gradaudit.learned.public import Public, Simulation
from gradaudit.learned.text.features import Examples, sizes_of
from gradaudit.learned.text.hashing import Hash
from gradaudit.learned.text.inverter import Inverter
from gradaudit.learned.text.layered_fit import fit_by_layers
from gradaudit.learned.text.network_fit import fit_network
from gradaudit.learned.text.plan import Lesson, Plan
from gradaudit.learned.text.word_pairs import count_pairs, weigh
from gradaudit.learned.text.words import classes_of
from gradaudit.models.base import TextModel
from gradaudit.streams import draw_seed, stream


def fit_inverter(
    simulation: Simulation,
    public: Public,
    target: Target,
    model: TextModel,
    plan: Plan,
    about: Mapping[str, Any],
    folder: Path | None,
    rng: torch.Generator,
) -> Inverter:
    """Return an inverter learned from public text alone.

    Args:
        simulation: replays the client on it.
        public: the text.
        target: what the inverter is made for.
        model: the public model.
        plan: what is learned, and how.
        about: the attack's hyperparameters, for the manifest.
        folder: where a checkpoint is kept until it is done; None for none.
        rng: of hash, weights, order and simulation.

    Raises:
        BadInputError: too few texts.
    """
    seed, size = draw_seed(rng), target.batch_size
    held = max(1, round(plan.validation * (len(public) // size)))
    kept = len(public) // size - held
    if kept < 1:
        raise BadInputError(
            f"[public] has {len(public)} texts that no audited batch holds; an attack that learns from updates of "
            f"{size} needs {2 * size} at least, and thousands to learn anything"
        )
    order = torch.randperm(len(public), generator=stream(seed, "split"))
    held_out = public.take(order[: held * size])
    shown = public.take(order[held * size : (held + kept) * size])
    hash_seed = draw_seed(stream(seed, "hash"))
    lesson = Lesson(simulation, public, shown, held_out, target, model, plan, about, folder, hash_seed, seed)
    found = fit_by_layers(lesson) if plan.layers else fit_network(lesson)
    return _with_pairs(found, lesson) if plan.pairs else found


def _with_pairs(found: Inverter, lesson: Lesson) -> Inverter:
    """Return an inverter that weighs what it reads by word pairs, where that reads more of what was held out."""
    about = found.manifest
    size = about.target.batch_size
    hash_ = Hash(sizes_of(about.target.tensors), about.bins, about.hash_seed, about.signed, about.apart)
    pairs = count_pairs(classes_of(lesson.shown, about.vocabulary, size), about.classes)
    examples = Examples(
        lesson.simulation, hash_, lesson.held_out, size, stream(lesson.seed, "pairs"), "lti: weighing word pairs"
    )

    def read() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(examples), 64):
            values, texts = examples(torch.arange(start, min(start + 64, len(examples))), start)
            yield found.network(found.scaling(values)), classes_of(texts, about.vocabulary, size)

    weight, right = weigh(pairs, read())
    if not weight:
        return found
    said = {"pairs": len(pairs.keys), "pairs_weight": weight, "accuracy": right}
    return replace(found, manifest=about.model_copy(update=said), pairs=pairs)
