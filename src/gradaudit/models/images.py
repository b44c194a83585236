"""Models of images: LeNet as the papers on gradient inversion use it, and a small residual network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradaudit.errors import BadInputError, NotSupportedError, unknown_name
from gradaudit.files import stored_tensors
from gradaudit.models.model import Model, Weights
from gradaudit.models.spec import ModelSpec
from gradaudit.models.state import fit_in
from gradaudit.models.views import View
from gradaudit.streams import global_stream, stream


@final
class ImageModel(Model):
    """A classifier of images as pure functions of its parameters; nothing in it is random or depends on the batch.

    Args:
        module: takes [B, C, H, W] in 0 to 1 and returns [B, classes]; its last layer is `head`.
        spec: how it was made; `spec.image` is the shape of an image.
        width: features that enter `head`.
        depth: layers before it.
    """

    def __init__(self, module: nn.Module, spec: ModelSpec, width: int, depth: int) -> None:
        assert spec.image is not None
        super().__init__(module, spec)
        self.shape: tuple[int, int, int] = spec.image
        self.width, self.depth = width, depth

    def logits(self, images: Tensor, params: Weights | None = None) -> Tensor:
        """Return [B, classes].

        Args:
            images: [B, C, H, W] in 0 to 1.
            params: parameters to use in place of the model's own.
        """
        if params is None:
            out: Tensor = self.module(images)
            return out
        return functional_call(self.module, dict(params), (images,))  # type: ignore[no-any-return]

    def loss(self, images: Tensor, labels: Tensor, params: Weights | None = None) -> Tensor:
        """Return the mean loss the client trains with (`spec.loss`).

        Args:
            images: [B, C, H, W] in 0 to 1.
            labels: [B] classes or [B, classes] distributions.
            params: parameters to use in place of the model's own.
        """
        logits = self.logits(images, params)
        if self.spec.loss == "cross-entropy":
            return F.cross_entropy(logits, labels)
        wanted = labels if labels.dim() == 2 else F.one_hot(labels, logits.shape[1]).to(logits.dtype)
        return (logits - wanted).square().sum(-1).mean()

    def gradients(self, images: Tensor, labels: Tensor, params: Weights | None = None) -> dict[str, Tensor]:
        """Return the gradient of many batches at once by parameter name, [N, ...]; differentiable by images and labels.

        Args:
            images: [N, B, C, H, W].
            labels: [N, B] classes or [N, B, classes] distributions.
            params: parameters in place of the model's own; the gradient is by these.
        """
        at = {name: p.detach() for name, p in (params or self._parameters).items()}

        def loss(params: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
            return self.loss(images, labels, params)

        found: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0, 0))(at, images, labels)
        return found

    def example_gradients(self, images: Tensor, labels: Tensor, params: Weights | None = None) -> dict[str, Tensor]:
        """Return each image's own gradient by parameter name, [B, ...]; as `gradients` with batches of one."""
        return self.gradients(images[:, None], labels[:, None], params)

    def views(self, layer: int, role: str) -> list[View]:
        raise NotSupportedError(
            f"model '{self.spec.name}' has no attention and so no roles (q, k, v, o, f, p); select 'all' or 'head'"
        )

    def group(self, name: str) -> list[str]:
        groups: dict[str, list[str]] = {"embeddings": [], "word": [], "position": []}
        groups["head"] = [n for n in self._parameters if n.startswith("head.")]
        if name not in groups:
            raise unknown_name("parameter group", name, groups)
        return groups[name]

    @contextmanager
    def training_mode(self, rate: float | None = None) -> Iterator[None]:
        yield  # nothing drops out, and no layer knows a mode

    def dropout_rate(self) -> float:
        return 0.0


@dataclass(frozen=True)
class ImageArchitecture:
    """How a model of images is made.

    Args:
        make: from channels, height, width and classes.
        about: one line for lists.
        uniform: half the width of the uniform distribution all parameters are drawn from; None for torch's own.
        depth: layers before the last one.
    """

    make: Callable[[tuple[int, int, int], int], LeNet | ResNet]
    about: str
    uniform: float | None
    depth: int


class LeNet(nn.Module):
    """Three 5 x 5 convolutions of 12 channels (strides 2, 2, 1) with sigmoids, and one linear layer.

    15,826 parameters on CIFAR-10. Source: DLG (Zhu et al., 2019), section 4, as LTI (Wu et al., 2022) uses it.
    """

    def __init__(self, image: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = image
        self.body = nn.Sequential(
            nn.Conv2d(channels, 12, 5, padding=2, stride=2),
            nn.Sigmoid(),
            nn.Conv2d(12, 12, 5, padding=2, stride=2),
            nn.Sigmoid(),
            nn.Conv2d(12, 12, 5, padding=2),
            nn.Sigmoid(),
        )
        self.features = 12 * _quarter(height) * _quarter(width)
        self.head = nn.Linear(self.features, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images).flatten(1))
        return logits


def _quarter(size: int) -> int:
    return (size + 3) // 4  # each stride of 2 rounds up


class ResNet(nn.Module):
    """A small residual network: 16, 32 and 64 channels, two blocks each, strides 1, 2, 2, mean over places.

    As He et al. (2016), section 4.2, with n = 2 (ResNet-14), and group normalization in place of batch normalization:
    in training mode that makes each example's gradient depend on the others, and in evaluation mode on random
    weights it normalizes by made-up statistics.
    """

    def __init__(self, image: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(image[0], 16, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, 16)
        blocks: list[nn.Module] = []
        before = 16
        for channels, stride in ((16, 1), (32, 2), (64, 2)):
            blocks += [_Block(before, channels, stride), _Block(channels, channels, 1)]
            before = channels
        self.blocks = nn.Sequential(*blocks)
        self.features = before
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.blocks(F.relu(self.norm(self.first(images))))
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


class _Block(nn.Module):
    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(before, channels, 3, padding=1, stride=stride, bias=False)
        self.norm = nn.GroupNorm(4, channels)
        self.two = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.last = nn.GroupNorm(4, channels)
        plain = before == channels and stride == 1
        self.shortcut = nn.Identity() if plain else nn.Conv2d(before, channels, 1, stride=stride, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.last(self.two(F.relu(self.norm(self.one(hidden)))))
        return F.relu(inner + self.shortcut(hidden))


IMAGE_MODELS: dict[str, ImageArchitecture] = {
    "lenet": ImageArchitecture(
        LeNet, "LeNet of the gradient inversion papers, all parameters uniform in -0.5 to 0.5 (DLG)", 0.5, 3
    ),
    "lenet-torch": ImageArchitecture(LeNet, "the same LeNet with PyTorch's own initialization", None, 3),
    "resnet": ImageArchitecture(ResNet, "ResNet-14 with group normalization, 16 to 64 channels", None, 13),
}
"""Architectures of images by the name a case uses.

DLG's release draws LeNet's parameters from -0.5 to 0.5, and releases built on LTI's do the same. It decides what leaks:
with PyTorch's smaller weights all of LeNet's sigmoids are near a half, and its first gradients tiny.
"""
SMALLEST, LARGEST = 4, 512
"""Sides of images, in pixels."""
MOST_CHANNELS = 64
"""Of images: more than any camera or scanner has."""


def load_image_model(spec: ModelSpec, device: torch.device | None = None) -> ImageModel:
    """Return the model of images a spec names: "NAME" with random weights, or "NAME:FILE.safetensors" with these.

    Args:
        spec: name, number of labels, seed, and the shape of the images.
        device: where to put the weights; the CPU when None.

    Raises:
        BadInputError: no such architecture, images of a size it does not take, or weights that do not fit it.
    """
    name, _, file = spec.name.partition(":")
    rng = stream(spec.seed, "model")
    with global_stream(rng, torch.device("cpu")):
        module = image_module(spec)
    known = IMAGE_MODELS[name]
    if known.uniform is not None:
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(known.uniform * (2 * torch.rand(p.shape, generator=rng) - 1))
    if file:
        _read_weights(module, file, spec.name)
    fit_in(module, spec.weights)
    if device is not None:
        module = module.to(device)
    return ImageModel(module, replace(spec, random_weights=not file), module.features, known.depth)


def image_module(spec: ModelSpec) -> LeNet | ResNet:
    """Return a new module of the architecture, image shape and number of classes that a spec names.

    Raises:
        BadInputError: no such architecture, or images of a size it does not take.
    """
    name = spec.name.partition(":")[0]
    if name not in IMAGE_MODELS:
        raise unknown_name("model of images", name, IMAGE_MODELS)
    if spec.image is None or not all(SMALLEST <= side <= LARGEST for side in spec.image[1:]):
        raise BadInputError(f"model '{name}' takes images of {SMALLEST} to {LARGEST} pixels a side, got {spec.image}")
    if not 1 <= spec.image[0] <= MOST_CHANNELS:
        raise BadInputError(f"model '{name}' takes images of 1 to {MOST_CHANNELS} channels, got {spec.image[0]}")
    if spec.lora is not None or spec.layers is not None or spec.loaded is not None:
        raise BadInputError(f"model '{name}' has neither blocks nor adapters: leave layers, --blocks and [lora] away")
    return IMAGE_MODELS[name].make(spec.image, spec.labels)


def _read_weights(module: nn.Module, file: str, name: str) -> None:
    wanted = {n: tuple(p.shape) for n, p in module.named_parameters()}
    if not Path(file).is_file():
        raise BadInputError(f"model '{name}': there is no file {file}")
    with stored_tensors(Path(file)) as opened:
        if opened.shapes != wanted:
            odd = sorted(set(opened.shapes.items()) ^ set(wanted.items()))[0][0]
            raise BadInputError(
                f"model '{name}': the weights in {file} are not of this architecture and number of classes "
                f"(they differ at '{odd}')"
            )
        weights = opened.read(wanted, finite=True)
    with torch.no_grad():
        for n, p in module.named_parameters():
            p.copy_(weights[n])
