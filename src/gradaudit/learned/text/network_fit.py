"""Fitting LTI's network: public updates are simulated, hashed and learned from."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gradaudit.learned.public import Public, drawn_like
from gradaudit.learned.scaling import Scaling, scaling_of
from gradaudit.learned.text.features import SimulatedUpdates, hashed, noised, sizes_of
from gradaudit.learned.text.hashing import Hash
from gradaudit.learned.text.inverter import Inverter, new_manifest
from gradaudit.learned.text.network import Network, NetworkShape, hits, loss_of
from gradaudit.learned.text.plan import Lesson
from gradaudit.learned.text.words import begin_with_words, classes_of, word_vectors
from gradaudit.learned.training import Recipe, Trained, train
from gradaudit.registry import describe
from gradaudit.streams import draw_seed, stream

RATES = (1e-3, 1e-4, 1e-5)
"""Learning rates that are tried where none is given (LTI, section 4.1)."""
_SCALED = 1024
"""Updates that the scaling of the inputs is taken from."""
_Source = Callable[[int], tuple[Tensor, Public]]
"""Gives the hashed updates of a step, and their texts."""


def fit_network(lesson: Lesson) -> Inverter:
    """Return an inverter that reads by LTI's network."""
    model, plan, public, seed = lesson.model, lesson.plan, lesson.public, lesson.seed
    size, vocabulary = lesson.target.batch_size, model.vocabulary_size
    kept = len(lesson.shown) // size
    hash_ = Hash(sizes_of(lesson.target.tensors), lesson.bins, lesson.hash_seed, plan.signed)
    checked = SimulatedUpdates(
        lesson.simulation, hash_, lesson.held_out, size, stream(seed, "validation"), "lti: validation"
    )
    source = _drawn(lesson, hash_) if plan.pseudo else _shown(lesson, hash_)
    ends = not bool(public.mask.all())
    shape = NetworkShape(hash_.bins, plan.bottleneck, plan.width, size, public.ids.shape[1], vocabulary + ends)
    scaling = scaling_of(torch.cat([source(-1 - n)[0] for n in range(-(-min(_SCALED, 16 * kept) // plan.batch))]))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        values, texts = source(step)
        return scaling(values), classes_of(texts, vocabulary, size)

    def validate(network: Network) -> float:
        return accuracy(network, scaling, checked, vocabulary)

    steps = plan.epochs * -(-kept // plan.batch)
    every = max(1, min(steps // 20, 500))

    def trained(rate: float, most: int, checkpoint: Path | None, what: str) -> tuple[Network, Trained]:
        network = Network(shape, stream(seed, "weights")).to(public.ids.device)
        if plan.own_words:
            begin_with_words(network.shared, word_vectors(model, plan.width), lesson.shown)
        recipe = Recipe(most, rate, plan.decay, min(every, most), plan.patience)
        loss = partial(loss_of, squared=plan.squared)
        return network, train(network, batch, validate, recipe, checkpoint, what, loss)

    def tried(rate: float) -> float:
        return trained(rate, min(plan.trial, steps), None, f"lti: trying a rate of {rate:g}")[1].score

    rate = plan.learning_rate or max(RATES, key=tried)
    network, found = trained(rate, steps, lesson.folder / "checkpoint.safetensors", "lti: training")
    manifest = new_manifest(lesson, hash_, shape, found, attack=describe(plan) | {"learning_rate": rate})
    return Inverter(manifest, network.requires_grad_(False).eval(), scaling)


@torch.no_grad()
def accuracy(network: Network, scaling: Scaling, examples: SimulatedUpdates, vocabulary: int) -> float:
    """Return the share (0 to 100) of positions read right in examples."""
    right, count = 0.0, len(examples)
    for start in range(0, count, 64):
        some = torch.arange(start, min(start + 64, count))
        values, texts = examples(some, start)
        targets = classes_of(texts, vocabulary, examples.size)
        right += hits(network(scaling(values)), targets) * len(some)
    return right / count


def _shown(lesson: Lesson, hash_: Hash) -> _Source:
    """Return what gives batches of the public text, shuffled every epoch."""
    rng = stream(lesson.seed, "shown")
    seed, size = draw_seed(rng), lesson.plan.batch
    examples = SimulatedUpdates(
        lesson.simulation, hash_, lesson.shown, lesson.target.batch_size, rng, "lti: simulating updates"
    )
    each = -(-len(examples) // size)

    def batch(step: int) -> tuple[Tensor, Public]:
        epoch, place = divmod(step, each)
        order = torch.randperm(len(examples), generator=stream(seed, "order", epoch))
        return examples(order[place * size : (place + 1) * size], step)

    return batch


def _drawn(lesson: Lesson, hash_: Hash) -> _Source:
    """Return what gives batches of words drawn from the public text (LTI-P), fresh every step."""
    seed, size, plan = draw_seed(stream(lesson.seed, "drawn")), lesson.target.batch_size, lesson.plan

    def batch(step: int) -> tuple[Tensor, Public]:
        rng = stream(seed, "step", step)
        texts = drawn_like(lesson.shown, plan.batch * size, lesson.model.special.ids, rng, plan.piece)
        return noised(hashed(lesson.simulation, hash_, texts, size, rng), hash_, rng), texts

    return batch
