"""Fitting LTI's network: public updates are simulated, hashed and learned from."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gradaudit.learned.public import Public, Simulation, drawn_like
from gradaudit.learned.scaling import Scaling, scaling_of
from gradaudit.learned.text.features import Examples, hashed, noised, sizes_of
from gradaudit.learned.text.hashing import Hash
from gradaudit.learned.text.inverter import Inverter, new_manifest
from gradaudit.learned.text.network import Network, NetworkShape, hits, loss_of
from gradaudit.learned.text.plan import Lesson, Plan
from gradaudit.learned.text.words import begin_with_words, classes_of, word_vectors
from gradaudit.learned.training import Recipe, train
from gradaudit.streams import draw_seed, stream

RATES = (1e-3, 1e-4, 1e-5)
"""Learning rates that are tried where none is given (LTI, section 4.1)."""
_SCALED = 1024
"""Updates that the scaling of the inputs is taken from."""


def fit_network(lesson: Lesson) -> Inverter:
    """Return an inverter that reads by LTI's network."""
    simulation, target, model, plan = lesson.simulation, lesson.target, lesson.model, lesson.plan
    public, shown, held_out, seed = lesson.public, lesson.shown, lesson.held_out, lesson.seed
    size, vocabulary = target.batch_size, model.vocabulary_size
    kept = len(shown) // size
    hash_ = Hash(sizes_of(target.tensors), plan.bins, lesson.hash_seed, plan.signed)
    checked = Examples(simulation, hash_, held_out, size, stream(seed, "validation"), "lti: validation")
    source: _Source = (
        _Drawn(simulation, hash_, shown, plan, size, model.special.ids, stream(seed, "drawn"))
        if plan.pseudo
        else _Shown(simulation, hash_, shown, plan, size, stream(seed, "shown"))
    )
    ends = not bool(public.mask.all())
    shape = NetworkShape(plan.bins, plan.bottleneck, plan.width, size, public.ids.shape[1], vocabulary + ends)
    scaling = scaling_of(torch.cat([source(-1 - n)[0] for n in range(-(-min(_SCALED, 16 * kept) // plan.batch))]))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        values, texts = source(step)
        return scaling(values), classes_of(texts, vocabulary, size)

    def validate(network: Network) -> float:
        return accuracy(network, scaling, checked, vocabulary)

    steps = plan.epochs * -(-kept // plan.batch)
    every = max(1, min(steps // 20, 500))

    def trained(rate: float, most: int, checkpoint: Path | None, what: str) -> tuple[Network, float, int]:
        network = Network(shape, stream(seed, "weights")).to(public.ids.device)
        if plan.own_words:
            begin_with_words(network.shared, word_vectors(model, plan.width), shown)
        recipe = Recipe(most, rate, plan.decay, min(every, most), plan.patience)
        loss = partial(loss_of, squared=plan.squared)
        found = train(network, batch, validate, recipe, checkpoint, what, loss)
        return network, found.score, found.steps

    rate = plan.learning_rate
    checkpoint = None if lesson.folder is None else lesson.folder / "checkpoint.safetensors"
    if not rate:
        tries = {r: trained(r, min(plan.trial, steps), None, f"lti: trying a rate of {r:g}")[1] for r in RATES}
        rate = max(tries, key=lambda r: tries[r])
    network, right, taken = trained(rate, steps, checkpoint, "lti: training")
    manifest = new_manifest(
        target=target,
        bins=plan.bins,
        hash_seed=hash_.seed,
        signed=plan.signed,
        bottleneck=plan.bottleneck,
        width=plan.width,
        length=shape.length,
        classes=shape.classes,
        vocabulary=vocabulary,
        ends=ends,
        attack={**lesson.about, "learning_rate": rate},
        public=public.where,
        texts=len(public),
        steps=taken,
        accuracy=right,
    )
    return Inverter(manifest, network.requires_grad_(False).eval(), scaling)


@torch.no_grad()
def accuracy(network: Network, scaling: Scaling, examples: Examples, vocabulary: int) -> float:
    """Return the share (0 to 100) of positions read right in examples."""
    right, count = 0.0, len(examples)
    for start in range(0, count, 64):
        some = torch.arange(start, min(start + 64, count))
        values, texts = examples(some, start)
        targets = classes_of(texts, vocabulary, examples.size)
        right += hits(network(scaling(values)), targets) * len(some)
    return right / count


class _Shown:
    """Batches of the public text, shuffled every epoch."""

    def __init__(
        self, simulation: Simulation, hash_: Hash, texts: Public, plan: Plan, size: int, rng: torch.Generator
    ) -> None:
        self._seed, self._batch = draw_seed(rng), plan.batch
        self._examples = Examples(simulation, hash_, texts, size, rng, "lti: simulating updates")

    def __call__(self, step: int) -> tuple[Tensor, Public]:
        count = len(self._examples)
        each = -(-count // self._batch)
        epoch, place = divmod(step, each)
        order = torch.randperm(count, generator=stream(self._seed, "order", epoch))
        return self._examples(order[place * self._batch : (place + 1) * self._batch], step)


class _Drawn:
    """Batches of words drawn from the public text (LTI-P), fresh every step."""

    def __init__(
        self,
        simulation: Simulation,
        hash_: Hash,
        texts: Public,
        plan: Plan,
        size: int,
        special: Collection[int],
        rng: torch.Generator,
    ) -> None:
        self._simulation, self._hash, self._texts = simulation, hash_, texts
        self._seed, self._count, self._size = draw_seed(rng), plan.batch * size, size
        self._special, self._piece = special, plan.piece

    def __call__(self, step: int) -> tuple[Tensor, Public]:
        rng = stream(self._seed, "step", step)
        texts = drawn_like(self._texts, self._count, self._special, rng, self._piece)
        return noised(hashed(self._simulation, self._hash, texts, self._size, rng), self._hash, rng), texts


_Source = _Shown | _Drawn
