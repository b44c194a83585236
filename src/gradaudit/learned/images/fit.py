"""Fitting an inverter of images: public updates are simulated, and a network or a kernel learns from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import gradaudit
from gradaudit.learned.images.features import compared, output_layer
from gradaudit.learned.images.inverter import ImageInverter, ImageManifest
from gradaudit.learned.images.kernel import Kernel, fit_kernel
from gradaudit.learned.images.network import ImageNetwork, ImageNetworkShape, in_slots
from gradaudit.learned.manifest import Target
from gradaudit.learned.scaling import Scaling, scaling_of
from gradaudit.learned.training import Recipe, split, train
from gradaudit.models.base import Model
from gradaudit.progress import step as progressed
from gradaudit.registry import describe, hyper
from gradaudit.streams import draw_seed, stream
from gradaudit.types import PublicImages

_SCALED = 1024
"""Updates that the scaling of the inputs is taken from."""
_TRIED = 1000
"""Updates that the inputs' scaling is chosen with."""
_POWERS = (0.0, 0.5)
"""Of a number's deviation, that it may be divided by."""
_CACHE = 2 << 30
"""Bytes of updates that are kept between epochs at most."""
_AT_ONCE = 256


class ReplaysImages(Protocol):
    """Replays the client, its defenses included, on public images."""

    @property
    def random(self) -> bool:
        """True when the same images give another update the next time."""

    def __call__(self, images: Tensor, labels: Tensor, rng: torch.Generator) -> Tensor:
        """Return updates [n, numbers] of images [n, B, C, H, W] with labels [n, B]."""


@dataclass(frozen=True)
class ImagePlan:
    """What is learned, and how: the hyperparameters of an attack that learns from public images."""

    inverter: str = hyper("", "folder of a fitted inverter; without one, 'run' and 'sweep' fit it from [public]")
    learner: str = hyper(
        "network",
        "'network', or 'kernel': ridge regression in closed form, faster and better with few thousand images",
        source="the paper's; the kernel is ours",
    )
    refine: int = hyper(
        0,
        "steps from what was read towards what explains the update best, as far from it as readings of public images "
        "are; 0 only reads; learner = 'kernel'",
        source="ours",
        later=True,
    )
    width: int = hyper(3000, "of each hidden layer", source="section 4.2")
    hidden: int = hyper(3, "hidden layers", source="section 4.2")
    epochs: int = hyper(200, "passes over the public images", source="section 4.2")
    batch: int = hyper(256, "updates a step", source="section 4.2")
    learning_rate: float = hyper(1e-3, "Adam's, at its highest", source="ours, for scaled inputs; the paper has 1e-4")
    mirrored: bool = hyper(True, "every second pass sees the public images mirrored", source="ours")
    validation: float = hyper(0.05, "share of the public images held out to choose by", source="ours")
    patience: int = hyper(6, "validations without a better one after which training stops; 0 never", source="ours")


def fit_image_inverter(
    simulate: ReplaysImages,
    public: PublicImages,
    target: Target,
    model: Model,
    plan: ImagePlan,
    folder: Path,
    rng: torch.Generator,
) -> ImageInverter:
    """Return an inverter learned from public images alone.

    Args:
        simulate: replays the client on them.
        public: the images.
        target: what the inverter is made for.
        model: the public model.
        plan: what is learned, and how.
        folder: where a checkpoint is kept until it is done.
        rng: of weights, order and simulation.

    Raises:
        BadInputError: too few images.
    """
    seed, size, count = draw_seed(rng), target.batch_size, len(public.labels)
    apart, rest = split(count, size, plan.validation, seed, "images")
    held_out = _Updates(simulate, public, apart, size, stream(seed, "validation"), model.device)
    shown = _Updates(simulate, public, rest, size, stream(seed, "shown"), model.device)
    _, channels, height, width = public.images.shape
    image = (channels, height, width)
    sizes: dict[str, Any] = {"width": 0, "hidden": 0, "references": 0, "directions": 0, "steps": 0}
    output = None
    reader: ImageNetwork | Kernel
    if plan.learner == "kernel":
        output = output_layer(model, target.tensors)
        reader, scaling, mse = _by_kernel(shown, held_out, plan.mirrored, target.tensors, output)
        sizes["references"] = len(reader.references)
        sizes["directions"] = 0 if reader.spread is None else len(reader.spread.variances)
    else:
        first = torch.arange(min(_SCALED, len(shown)))
        parts = [first[at : at + _AT_ONCE] for at in range(0, len(first), _AT_ONCE)]
        scaling = scaling_of(torch.cat([shown(rows, -1 - n, False)[0] for n, rows in enumerate(parts)]))
        shape = ImageNetworkShape(len(scaling.mean), plan.width, plan.hidden, size, image)
        network = ImageNetwork(shape, stream(seed, "weights")).to(model.device)
        steps, mse = _by_network(network, shown, held_out, scaling, plan, seed, folder / "checkpoint.safetensors")
        sizes |= {"width": plan.width, "hidden": plan.hidden, "steps": steps}
        reader = network.requires_grad_(False).eval().cpu()
    manifest = ImageManifest(
        program=gradaudit.__version__,
        target=target,
        image=image,
        output=output,
        attack=describe(plan),
        public=public.where,
        images=count,
        mse=mse,
        **sizes,
    )
    return ImageInverter(manifest, reader, Scaling(scaling.mean.cpu(), scaling.deviation.cpu()))


def _by_kernel(
    shown: _Updates, held_out: _Updates, mirrored: bool, shapes: Mapping[str, tuple[int, ...]], output: str | None
) -> tuple[Kernel, Scaling, float]:
    """Return a kernel regression, the scaling of its inputs, and its error on held-out images.

    Args:
        shown, held_out: the parts of the public images that are learned from and chosen by.
        mirrored: learn from the mirrored images, too.
        shapes: of the tensors that are seen.
        output: see `compared`.
    """
    numbers, images = shown(torch.arange(len(shown)), 0, False)
    if mirrored:
        more, again = shown(torch.arange(len(shown)), 1, True)
        numbers, images = torch.cat([numbers, more]), torch.cat([images, again])
        del more
    others, truth = held_out(torch.arange(len(held_out)), 0, False)
    progressed("lti: kernel", 0, 1)
    blocks = compared(numbers, shapes, output)
    widths = [block.shape[1] for block in blocks]
    inputs, others = torch.cat(blocks, 1), torch.cat(compared(others, shapes, output), 1)
    del numbers, blocks
    some = slice(0, min(_TRIED, len(inputs)))
    wanted, right = images[:, 0], truth[:, 0]

    def error(scaling: Scaling) -> float:
        return fit_kernel(scaling(inputs[some]), wanted[some], scaling(others), right)[1]

    scalings = [_by_blocks(scaling_of(inputs[:_SCALED]), power, inputs[:_SCALED], widths) for power in _POWERS]
    scaling = min(scalings, key=error)
    inputs.sub_(scaling.mean).div_(scaling.deviation)
    kernel, found = fit_kernel(inputs, wanted, scaling(others), right)
    progressed("lti: kernel", 1, 1)
    return Kernel.of({name: tensor.cpu() for name, tensor in kernel.tensors().items()}), scaling, found


def _by_blocks(scaling: Scaling, power: float, values: Tensor, widths: list[int]) -> Scaling:
    """Return the scaling by a power of each number's deviation, below 1: what moves more weighs more; blocks alike."""
    still = scaling.deviation.isinf()
    soft = Scaling(scaling.mean, scaling.deviation.pow(power).masked_fill(still, torch.inf))
    units = [block.square().sum(1).mean().sqrt() for block in torch.split(soft(values), widths, 1)]
    every = torch.cat([unit.expand(width) for unit, width in zip(units, widths, strict=True)])
    # a block that never moves says nothing; all blocks together have a mean square norm of 1
    return Scaling(soft.mean, soft.deviation * every.clamp_min(1e-12) * math.sqrt(len(widths)))


def _by_network(
    network: ImageNetwork,
    shown: _Updates,
    held_out: _Updates,
    scaling: Scaling,
    plan: ImagePlan,
    seed: int,
    checkpoint: Path,
) -> tuple[int, float]:
    """Train a network in place and return the steps taken and its error on held-out images."""
    network.begin_with(shown.mean())
    each = -(-len(shown) // plan.batch)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        epoch, place = divmod(step, each)
        mixed = torch.randperm(len(shown), generator=stream(seed, "order", epoch))
        rows = mixed[place * plan.batch : (place + 1) * plan.batch]
        numbers, images = shown(rows, step, plan.mirrored and epoch % 2 == 1)
        return scaling(numbers), images

    def validate(network: ImageNetwork) -> float:
        return -mean_squared_error(network, scaling, held_out)

    steps = plan.epochs * each
    recipe = Recipe(steps, plan.learning_rate, True, max(1, min(steps // 20, 500)), plan.patience)
    found = train(network, batch, validate, recipe, checkpoint, "lti: training", _loss)
    return found.steps, -found.score


def _loss(made: Tensor, images: Tensor) -> Tensor:
    error: Tensor = (made - in_slots(made, images)).square().mean()
    return error


class _Updates:
    """Public updates as numbers, from memory where they stay the same, simulated anew where they do not."""

    def __init__(
        self,
        simulate: ReplaysImages,
        public: PublicImages,
        rows: Tensor,
        size: int,
        rng: torch.Generator,
        device: torch.device,
    ) -> None:
        self._simulate, self._seed = simulate, draw_seed(rng)
        self._images = public.images[rows].unflatten(0, (-1, size)).to(device)  # type: ignore[no-untyped-call]
        self._labels = public.labels[rows].view(-1, size).to(device)
        self._kept: dict[bool, Tensor] = {}

    def __len__(self) -> int:
        return len(self._labels)

    def mean(self) -> Tensor:
        """Return the mean image."""
        found: Tensor = self._images.mean((0, 1))
        return found

    def __call__(self, updates: Tensor, turn: int, mirrored: bool) -> tuple[Tensor, Tensor]:
        """Return the numbers [n, inputs] of some updates and their images; another turn gives fresh noise."""
        images = self._images[updates]
        if mirrored:
            images = images.flip(-1)
        if self._simulate.random:
            return self._simulate(images, self._labels[updates], stream(self._seed, "turn", turn)), images
        if mirrored not in self._kept:
            every = self._images.flip(-1) if mirrored else self._images
            one = self._simulate(every[:1], self._labels[:1], stream(self._seed, "kept"))
            if 2 * len(self) * one.numel() * one.element_size() > _CACHE:
                return self._simulate(images, self._labels[updates], stream(self._seed, "kept")), images
            starts = range(0, len(every), _AT_ONCE)
            labels, same = self._labels, stream(self._seed, "kept")
            parts = [self._simulate(every[at : at + _AT_ONCE], labels[at : at + _AT_ONCE], same) for at in starts]
            self._kept[mirrored] = torch.cat(parts)
        found: Tensor = self._kept[mirrored][updates]
        return found, images


@torch.no_grad()
def mean_squared_error(network: ImageNetwork, scaling: Scaling, updates: _Updates) -> float:
    """Return the mean squared error over pixels of what a network reads, images in their best slots."""
    total = 0.0
    for start in range(0, len(updates), _AT_ONCE):
        rows = torch.arange(start, min(start + _AT_ONCE, len(updates)))
        numbers, images = updates(rows, start, False)
        made = network(scaling(numbers)).clamp(0, 1)
        total += float((made - in_slots(made, images)).square().mean()) * len(rows)
    return total / len(updates)
