"""Fitting a reader by layers: a linear guess first, then a network on guesses of updates it was not fitted to."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from gradaudit.errors import BadInputError
from gradaudit.learned.manifest import Target
from gradaudit.learned.public import Public, drawn_like
from gradaudit.learned.ridge import fit_ridge
from gradaudit.learned.scaling import scaling_of
from gradaudit.learned.text.features import hashed, noised, sizes_of
from gradaudit.learned.text.hashing import Hash
from gradaudit.learned.text.inverter import Inverter, new_manifest
from gradaudit.learned.text.layers import LayeredNetwork, LayeredShape, Reader
from gradaudit.learned.text.network import hits, loss_of
from gradaudit.learned.text.plan import Lesson
from gradaudit.learned.text.words import begin_with_words, classes_of, word_vectors
from gradaudit.learned.training import Recipe, Trained, train
from gradaudit.models.base import TextModel
from gradaudit.progress import step as progressed
from gradaudit.streams import stream

_AT_ONCE = 256
"""Updates that are simulated together."""
_LARGEST = 1 << 33
"""Bytes of the linear guess and of the updates it is fitted to at most."""
_RATE = 1e-3
"""Adam's where none is given."""
_Told = tuple[Tensor, Tensor]
"""What is told of each position of some updates, [n, T, width + rows], and the right classes, [n, 1, T]."""


def fit_by_layers(lesson: Lesson) -> Inverter:
    """Return an inverter that reads by layers.

    Raises:
        BadInputError: batches of several sentences, or a linear guess that does not fit into memory.
    """
    simulation, target, model, plan = lesson.simulation, lesson.target, lesson.model, lesson.plan
    public, shown, seed = lesson.public, lesson.shown, lesson.seed
    if target.batch_size > 1:
        raise BadInputError(
            "attack 'lti': learner = \"layers\" reads one sentence by its positions; several share them: use learner = "
            '"network"'
        )
    length, vocabulary, device = public.ids.shape[1], model.vocabulary_size, public.ids.device
    known = word_vectors(model, plan.width)
    apart = _position_rows(model, target, length)
    own = apart[2] if apart is not None else 0
    inputs = lesson.bins + own
    few = min(plan.references, len(shown))
    width = known.shape[1]
    if 4 * inputs * (few + length * width) > _LARGEST:
        raise BadInputError(
            f"attack 'lti': {inputs} inputs for {few} references and {length} positions do not fit into memory; lower "
            "share, references or width"
        )
    ends = not bool(public.mask.all())
    hash_ = Hash(sizes_of(target.tensors), inputs, lesson.hash_seed, plan.signed, apart)
    shape = LayeredShape(inputs, own // length, plan.bottleneck, width, length, vocabulary + ends)
    network = LayeredNetwork(shape, stream(seed, "weights"))
    network.reader.to(device)

    def features(texts: Public, *what: str | int) -> Tensor:
        return noised(hashed(simulation, hash_, texts, 1, stream(seed, *what)), hash_, stream(seed, "noise", *what))

    def shown_in(epoch: int) -> Public:
        """Return what is learned from in an epoch: drawn anew for each, or the public text."""
        what = ("drawn", epoch) if epoch else ("drawn",)
        if not plan.pseudo:
            return shown
        return drawn_like(shown, len(shown), model.special.ids, stream(seed, *what), plan.piece)

    texts = shown_in(0)
    first = torch.empty(few, inputs, device=device)
    for start in range(0, few, _AT_ONCE):
        rows = torch.arange(start, min(start + _AT_ONCE, few))
        first[start : start + _AT_ONCE] = features(texts.take(rows.to(device)), "shown", start)
        progressed("lti: simulating updates", int(rows[-1]) + 1, len(texts))
    scaling = scaling_of(first)
    first.sub_(scaling.mean).div_(scaling.deviation)
    wanted = torch.cat([known, known.new_zeros(1, width)])[classes_of(texts, vocabulary, 1)[:few]].flatten(1)
    last = network.told(wanted, first).half()
    ridge = fit_ridge(first, wanted)  # scales its inputs
    last[..., :width] = ridge.left_out.view(few, length, width).half()
    del first
    network.set_linear(ridge.weights, ridge.offset)

    def told_of(texts: Public, start: int, stop: int, what: str) -> Tensor:
        found = scaling(features(texts.take(torch.arange(start, stop, device=device)), what, start))
        return network.told(network.linear(found), found).half()

    @torch.no_grad()
    def every(texts: Public, start: int, what: str, done: list[Tensor]) -> _Told:
        for at in range(start, len(texts), _AT_ONCE):
            stop = min(at + _AT_ONCE, len(texts))
            done.append(told_of(texts, at, stop, what))
            if what != "validation":
                progressed("lti: simulating updates", stop, len(texts))
        return torch.cat(done), classes_of(texts, vocabulary, 1)

    learned = every(texts, few, "shown", [last])
    checked = every(lesson.held_out, 0, "validation", [])
    begin_with_words(network.reader.shared, known, texts)

    def told_in(epoch: int) -> _Told:
        return every(shown_in(epoch), 0, f"shown in {epoch}", []) if epoch and plan.pseudo else learned

    found = _train(network.reader, told_in, checked, lesson)
    manifest = new_manifest(lesson, hash_, shape, found, learner="layers")
    return Inverter(manifest, network.requires_grad_(False).eval(), scaling)


def _train(reader: Reader, told_in: Callable[[int], _Told], checked: _Told, lesson: Lesson) -> Trained:
    """Train a reader in place and return what came of it, scored by its accuracy on held-out public text.

    Args:
        reader: what is trained.
        told_in: what is learned from in an epoch.
        checked: held-out public text.
        lesson: how it is learned.
    """
    plan, seed, count = lesson.plan, lesson.seed, len(lesson.shown)
    each = -(-count // plan.batch)
    steps = plan.epochs * each
    told_once = lru_cache(1)(told_in)  # of one epoch at a time: each may be a gigabyte

    def batch(step: int) -> tuple[Tensor, Tensor]:
        epoch, place = divmod(step, each)
        told, classes = told_once(epoch)
        order = torch.randperm(count, generator=stream(seed, "order", epoch))
        rows = order[place * plan.batch : (place + 1) * plan.batch].to(told.device)
        return told[rows].float(), classes[rows]

    def validate(reader: Reader) -> float:
        return accuracy(reader, *checked)

    every = max(1, min(steps // 20, 500))
    recipe = Recipe(steps, plan.learning_rate or _RATE, plan.decay, every, plan.patience)
    checkpoint = lesson.folder / "checkpoint.safetensors"
    return train(reader, batch, validate, recipe, checkpoint, "lti: training", loss_of)


@torch.no_grad()
def accuracy(reader: nn.Module, told: Tensor, classes: Tensor) -> float:
    """Return the share (0 to 100) of positions read right."""
    right = 0.0
    for start in range(0, len(told), 64):
        some = slice(start, start + 64)
        right += hits(reader(told[some].float()), classes[some]) * len(told[some])
    return right / len(told)


def _position_rows(model: TextModel, target: Target, length: int) -> tuple[str, int, int] | None:
    """Return the view of the position table's gradient, and where in it the rows of a sentence's positions lie."""
    for name in model.group("position"):
        if name in target.tensors:
            rows, width = target.tensors[name]
            if model.first_position_row + length <= rows:
                return name, model.first_position_row * width, length * width
    return None
