"""A learned inverter of images: what it was made for, its network, both on disk, and how it is trained.

As `learned.inverter` has it for text: nothing is unpickled, and sizes are checked before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

import gradaudit
from gradaudit.errors import BadInputError
from gradaudit.learned.features import Scaling, scaling_of
from gradaudit.learned.image_network import ImageNetwork, ImageNetworkShape, in_slots
from gradaudit.learned.inverter import Plain, Target, read_manifest_of, read_tensors, refuse_misfit, write_inverter
from gradaudit.learned.kernel import Kernel, KernelShape, fit_kernel
from gradaudit.learned.training import Recipe, train
from gradaudit.models.base import Model
from gradaudit.progress import step
from gradaudit.streams import draw_seed, stream
from gradaudit.types import Observation, PublicImages

_SCALED = 1024
"""Updates that the scaling of the inputs is taken from."""
_CACHE = 2 << 30
"""Bytes of updates that are kept between epochs at most."""
_AT_ONCE = 256


class ImageManifest(Plain):
    """`manifest.json` of an inverter of images.

    Args:
        format: of the folder.
        program: version of gradaudit that made it.
        target: what it is made for.
        image: channels, height and width.
        width, hidden: of the network; 0 for a kernel regression.
        references: updates that a kernel regression is made of; 0 for a network.
        attack: the attack's hyperparameters.
        public: where the public images came from.
        images: how many of them there were.
        steps: of training.
        mse: mean squared error on public images that were not trained on.
    """

    format: Literal["images-1"] = "images-1"
    program: str
    target: Target
    image: tuple[int, int, int]
    width: int = Field(ge=0, le=1 << 16)
    hidden: int = Field(ge=0, le=16)
    references: int = Field(ge=0, le=1 << 20)
    attack: dict[str, Any]
    public: str
    images: int
    steps: int
    mse: float

    @property
    def inputs(self) -> int:
        """Numbers of an update."""
        return sum(math.prod(shape) for shape in self.target.tensors.values())

    def shape(self) -> ImageNetworkShape | KernelShape:
        """Return the sizes of what was learned."""
        if self.references:
            return KernelShape(self.inputs, self.references, self.image)
        return ImageNetworkShape(self.inputs, self.width, self.hidden, self.target.batch_size, self.image)


@dataclass(frozen=True)
class ImageInverter:
    """A trained network with all that it needs to read an update.

    Args:
        manifest: what it is.
        reader: what was learned.
        scaling: of its inputs.
    """

    manifest: ImageManifest
    reader: ImageNetwork | Kernel
    scaling: Scaling

    @torch.no_grad()
    def images(self, seen: Observation[Any]) -> Tensor:
        """Return the images [B, C, H, W] that the network reads out of an update.

        Raises:
            NotSupportedError: the update is not what the inverter is made for.
        """
        refuse_misfit(self.manifest.target, seen)
        numbers = torch.cat([seen.tensors[name].float().flatten() for name in self.manifest.target.tensors])[None]
        # an inverter is read to the CPU, and one pass is nothing
        made: Tensor = self.reader(self.scaling(numbers.cpu()))
        return made.view(self.manifest.target.batch_size, *self.manifest.image).clamp(0, 1).to(numbers.device)


class Simulation(Protocol):
    """Replays the client, its defenses included, on public images."""

    @property
    def random(self) -> bool:
        """True when the same images give another update the next time."""

    def __call__(self, images: Tensor, labels: Tensor, rng: torch.Generator) -> Tensor:
        """Return updates [n, numbers] of images [n, B, C, H, W] with labels [n, B]."""


@dataclass(frozen=True)
class Plan:
    """What is learned, and how.

    Args:
        kernel: a kernel regression in place of a network.
        width, hidden: of the network.
        epochs: passes over the public images.
        batch: updates a step.
        learning_rate: Adam's, at its highest.
        mirrored: every second pass sees the images mirrored.
        validation: share of the public images that is held out.
        patience: see `Recipe`.
    """

    kernel: bool
    width: int
    hidden: int
    epochs: int
    batch: int
    learning_rate: float
    mirrored: bool
    validation: float
    patience: int


def fit_image_inverter(
    simulate: Simulation,
    public: PublicImages,
    target: Target,
    model: Model,
    plan: Plan,
    about: Mapping[str, Any],
    folder: Path | None,
    rng: torch.Generator,
) -> ImageInverter:
    """Return an inverter learned from public images alone.

    Args:
        simulate: replays the client on them.
        public: the images.
        target: what the inverter is made for.
        model: the public model.
        plan: what is learned, and how.
        about: the attack's hyperparameters, for the manifest.
        folder: where a checkpoint is kept until it is done; None for none.
        rng: of weights, order and simulation.

    Raises:
        BadInputError: too few images.
    """
    seed, size, count = draw_seed(rng), target.batch_size, len(public.labels)
    held = max(1, round(plan.validation * (count // size)))
    kept = count // size - held
    if kept < 1:
        raise BadInputError(
            f"[public] has {count} images that no audited batch holds; an attack that learns from updates of {size} "
            f"needs {2 * size} at least, and thousands to learn anything"
        )
    order = torch.randperm(count, generator=stream(seed, "split"))
    held_out = _Updates(simulate, public, order[: held * size], size, stream(seed, "validation"), model.device)
    shown = _Updates(
        simulate, public, order[held * size : (held + kept) * size], size, stream(seed, "shown"), model.device
    )
    first = torch.arange(min(_SCALED, kept))
    parts = [first[at : at + _AT_ONCE] for at in range(0, len(first), _AT_ONCE)]
    some = torch.cat([shown(rows, -1 - n, False)[0] for n, rows in enumerate(parts)])
    scaling = _softened(scaling_of(some)) if plan.kernel else scaling_of(some)
    image = _image_of(public)
    if plan.kernel:
        every, held_rows = torch.arange(kept), torch.arange(held)
        numbers, images = shown(every, 0, False)
        if plan.mirrored:
            more, again = shown(every, 1, True)
            numbers, images = torch.cat([numbers, more]), torch.cat([images, again])
        others, truth = held_out(held_rows, 0, False)
        scaled = scaling(numbers)
        unit = scaled.square().sum(1).mean().sqrt()
        scaling = Scaling(scaling.mean, scaling.deviation * unit)
        step("lti: kernel", 0, 1)
        reader, error = fit_kernel(scaled / unit, images[:, 0], scaling(others), truth[:, 0])
        step("lti: kernel", 1, 1)
        about = dict(about) | {"sharpness": float(reader.sharpness)}
        sizes: dict[str, Any] = {"width": 0, "hidden": 0, "references": len(numbers), "steps": 0}
        return ImageInverter(_manifest(target, image, about, public, sizes, error), _on_cpu(reader), _at_home(scaling))
    shape = ImageNetworkShape(some.shape[1], plan.width, plan.hidden, size, image)
    network = ImageNetwork(shape, stream(seed, "weights")).to(model.device)
    network.begin_with(shown.mean())
    each = -(-kept // plan.batch)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        epoch, place = divmod(step, each)
        mixed = torch.randperm(kept, generator=stream(seed, "order", epoch))
        rows = mixed[place * plan.batch : (place + 1) * plan.batch]
        numbers, images = shown(rows, step, plan.mirrored and epoch % 2 == 1)
        return scaling(numbers), images

    def validate(network: ImageNetwork) -> float:
        return -mean_squared_error(network, scaling, held_out)

    steps = plan.epochs * each
    recipe = Recipe(steps, plan.learning_rate, True, max(1, min(steps // 20, 500)), plan.patience)
    checkpoint = None if folder is None else folder / "checkpoint.safetensors"
    found = train(network, batch, validate, recipe, checkpoint, "lti: training", _loss)
    sizes = {"width": plan.width, "hidden": plan.hidden, "references": 0, "steps": found.steps}
    manifest = _manifest(target, image, about, public, sizes, -found.score)
    return ImageInverter(manifest, network.requires_grad_(False).eval().cpu(), _at_home(scaling))


def _image_of(public: PublicImages) -> tuple[int, int, int]:
    _, channels, height, width = public.images.shape
    return channels, height, width


def _manifest(
    target: Target,
    image: tuple[int, int, int],
    about: Mapping[str, Any],
    public: PublicImages,
    sizes: Mapping[str, Any],
    mse: float,
) -> ImageManifest:
    return ImageManifest(
        program=gradaudit.__version__,
        target=target,
        image=image,
        attack=dict(about),
        public=public.where,
        images=len(public.labels),
        mse=mse,
        **sizes,
    )


def _softened(scaling: Scaling) -> Scaling:
    """Return a scaling by the root of each number's deviation: what moves more still weighs more in a kernel."""
    return Scaling(scaling.mean, scaling.deviation.sqrt())


def _at_home(scaling: Scaling) -> Scaling:
    return Scaling(scaling.mean.cpu(), scaling.deviation.cpu())


def _on_cpu(kernel: Kernel) -> Kernel:
    return Kernel(**{name: tensor.cpu() for name, tensor in kernel.tensors().items()})


def _loss(made: Tensor, images: Tensor) -> Tensor:
    error: Tensor = (made - in_slots(made, images)).square().mean()
    return error


class _Updates:
    """Public updates as numbers, from memory where they stay the same, simulated anew where they do not."""

    def __init__(
        self,
        simulate: Simulation,
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


def save_image_inverter(folder: Path, inverter: ImageInverter) -> Path:
    """Write an inverter into a folder and return it.

    Raises:
        BadInputError: the folder cannot be written.
    """
    reader = inverter.reader
    held = reader.tensors() if isinstance(reader, Kernel) else dict(reader.named_parameters())
    return write_inverter(folder, inverter.manifest, held, inverter.scaling)


def load_image_inverter(folder: Path) -> ImageInverter:
    """Read an inverter of images; its sizes are checked against the file's header before any of it is loaded.

    Raises:
        BadInputError: not an inverter of images, truncated, or tensors that are not those of the manifest.
    """
    manifest = read_manifest_of(folder, ImageManifest)
    shape = manifest.shape()
    tensors, scaling = read_tensors(folder, shape.tensors(), shape.inputs)
    if isinstance(shape, KernelShape):
        return ImageInverter(manifest, Kernel(**tensors), scaling)
    network = ImageNetwork(shape)
    network.load_state_dict(tensors, assign=True)
    return ImageInverter(manifest, network.requires_grad_(False).eval(), scaling)
