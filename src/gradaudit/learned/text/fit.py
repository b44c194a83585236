"""Fitting an inverter of text: what is shown and what is held out, who reads, and what word pairs add."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gradaudit.learned.manifest import Target
from gradaudit.learned.public import Public, ReplaysText
from gradaudit.learned.text.features import SimulatedUpdates
from gradaudit.learned.text.inverter import Inverter
from gradaudit.learned.text.layered_fit import fit_by_layers
from gradaudit.learned.text.network_fit import fit_network
from gradaudit.learned.text.plan import Lesson, Plan
from gradaudit.learned.text.word_pairs import count_pairs, weigh
from gradaudit.learned.text.words import classes_of
from gradaudit.learned.training import split
from gradaudit.models.base import TextModel
from gradaudit.streams import draw_seed, stream


def fit_inverter(
    simulation: ReplaysText,
    public: Public,
    target: Target,
    model: TextModel,
    plan: Plan,
    folder: Path,
    rng: torch.Generator,
) -> Inverter:
    """Return an inverter learned from public text alone.

    Args:
        simulation: replays the client on it.
        public: the text.
        target: what the inverter is made for.
        model: the public model.
        plan: what is learned, and how.
        folder: where a checkpoint is kept until it is done.
        rng: of hash, weights, order and simulation.

    Raises:
        BadInputError: too few texts.
    """
    seed = draw_seed(rng)
    held_out, shown = split(len(public), target.batch_size, plan.validation, seed, "texts")
    lesson = Lesson(simulation, public, public.take(shown), public.take(held_out), target, model, plan, folder, seed)
    found = fit_by_layers(lesson) if plan.learner == "layers" else fit_network(lesson)
    return _with_pairs(found, lesson) if plan.pairs else found


def _with_pairs(found: Inverter, lesson: Lesson) -> Inverter:
    """Return an inverter that weighs what it reads by word pairs, where that reads more of what was held out."""
    about = found.manifest
    size = about.target.batch_size
    pairs = count_pairs(classes_of(lesson.shown, about.vocabulary, size), about.classes)
    examples = SimulatedUpdates(
        lesson.simulation, about.hash(), lesson.held_out, size, stream(lesson.seed, "pairs"), "lti: weighing word pairs"
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
