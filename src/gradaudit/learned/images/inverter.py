"""A learned inverter of images: what it was made for, what was learned, and both on disk.

As `learned.inverter` has it for text: nothing is unpickled, and sizes are checked before anything is allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.learned.images.features import compared
from gradaudit.learned.images.kernel import Kernel, KernelShape
from gradaudit.learned.images.network import ImageNetwork, ImageNetworkShape
from gradaudit.learned.images.residuals import Spread
from gradaudit.learned.manifest import Plain, Target, read_manifest_of, read_tensors, refuse_misfit, write_inverter
from gradaudit.learned.scaling import Scaling
from gradaudit.learned.training import with_weights
from gradaudit.types import Observation


class ImageManifest(Plain):
    """`manifest.json` of an inverter of images.

    Args:
        format: of the folder.
        program: version of gradaudit that made it.
        target: what it is made for.
        image: channels, height and width.
        width, hidden: of the network; 0 for a kernel regression.
        references: updates that a kernel regression is made of; 0 for a network.
        output: the output layer's matrix, which a kernel compares by what it read; None compares all numbers.
        directions: in which a kernel's readings are most off; 0 where that is not known.
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
    output: str | None = None
    directions: int = Field(default=0, ge=0, le=1 << 16)
    attack: dict[str, Any]
    public: str
    images: int
    steps: int
    mse: float

    @model_validator(mode="after")
    def _has_its_output(self) -> ImageManifest:
        if self.output is not None and len(self.target.tensors.get(self.output, ())) != 2:
            raise ValueError("output is not a matrix among the tensors")
        if self.references and self.target.batch_size > 1:
            raise ValueError("a kernel reads one image an update")
        return self

    @property
    def inputs(self) -> int:
        """Numbers that are read."""
        shapes = self.target.tensors
        return sum(shape[-1] if name == self.output else math.prod(shape) for name, shape in shapes.items())

    def shape(self) -> ImageNetworkShape | KernelShape:
        """Return the sizes of what was learned."""
        if self.references:
            return KernelShape(self.inputs, self.references, self.image, self.directions)
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

    @property
    def spread(self) -> Spread | None:
        """How far readings are off; None where that is not known."""
        return self.reader.spread if isinstance(self.reader, Kernel) else None

    @torch.no_grad()
    def images(self, seen: Observation[Any]) -> Tensor:
        """Return the images [B, C, H, W] that are read out of an update, not yet limited to 0 to 1.

        Raises:
            NotSupportedError: the update is not what the inverter is made for.
        """
        refuse_misfit(self.manifest.target, seen)
        if self.manifest.image != seen.model.shape:
            raise NotSupportedError(f"the inverter reads images of {self.manifest.image}, the model {seen.model.shape}")
        numbers = torch.cat([seen.tensors[name].float().flatten() for name in self.manifest.target.tensors])[None]
        # an inverter is read to the CPU, and one pass is nothing
        rows = torch.cat(compared(numbers.cpu(), self.manifest.target.tensors, self.manifest.output), 1)
        made: Tensor = self.reader(self.scaling(rows))
        return made.view(self.manifest.target.batch_size, *self.manifest.image).to(numbers.device)


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
        if shape.directions and (float(tensors["floor"]) <= 0 or float(tensors["variances"].min()) < 0):
            raise BadInputError(f"{folder} holds variances below zero; it is damaged, fit it again")
        return ImageInverter(manifest, Kernel.of(tensors), scaling)
    return ImageInverter(manifest, with_weights(ImageNetwork(shape), tensors), scaling)
