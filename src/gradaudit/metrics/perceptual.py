"""LPIPS: the distance of two images in the features of AlexNet, by weights that the user brings.

No package carries AlexNet's weights, and nothing is fetched here. `docs/case-file.md` says how the file is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gradaudit.errors import BadInputError
from gradaudit.files import stored_tensors

_LAYERS = ((0, 3, 64, 11, 4, 2), (3, 64, 192, 5, 1, 2), (6, 192, 384, 3, 1, 1), (8, 384, 256, 3, 1, 1),
           (10, 256, 256, 3, 1, 1))  # fmt: skip
"""AlexNet's convolutions: number, channels in and out, side, stride, padding."""
_POOLED = frozenset({3, 6})
"""Convolutions that see the largest of 3 x 3."""
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""ImageNet's mean and deviation for pixels of -1 to 1."""
SMALLEST = 31
"""Side from which AlexNet's features are not empty."""


@dataclass(frozen=True)
class Perceptual:
    """LPIPS of the package lpips 0.1 (Zhang et al., arXiv 1801.03924), AlexNet, linear weights included.

    Args:
        tensors: weights by the package's own names.
    """

    tensors: Mapping[str, Tensor]

    @torch.no_grad()
    def __call__(self, originals: Tensor, guesses: Tensor) -> list[float | None]:
        """Return the distance of each pair of images [B, C, H, W] in 0 to 1; None where they are too small.

        Gray images count as gray pictures of three channels.
        """
        if min(originals.shape[2:]) < SMALLEST:
            return [None] * len(originals)
        total = torch.zeros(len(originals))
        ours, theirs = self._features(originals), self._features(guesses)
        for layer, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            apart = (_unit(one) - _unit(other)).square()
            total += F.conv2d(apart, self.tensors[f"lin{layer}.model.1.weight"]).mean((1, 2, 3))
        return [float(value) for value in total]

    def _features(self, images: Tensor) -> list[Tensor]:
        shift, scale = (torch.tensor(v).view(1, 3, 1, 1) for v in (_SHIFT, _SCALE))
        x = (2 * images.float().expand(-1, 3, -1, -1) - 1 - shift) / scale
        out = []
        for place, (number, _, _, _, stride, padding) in enumerate(_LAYERS, 1):
            if number in _POOLED:
                x = F.max_pool2d(x, 3, 2)
            name = f"net.slice{place}.{number}"
            x = F.relu(F.conv2d(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], stride, padding))
            out.append(x)
        return out


def _unit(features: Tensor) -> Tensor:
    return features / (1e-8 + features.square().sum(1, keepdim=True)).sqrt()


def perceptual_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights by name."""
    out: dict[str, tuple[int, ...]] = {}
    for layer, (number, inputs, outputs, side, _, _) in enumerate(_LAYERS):
        out[f"net.slice{layer + 1}.{number}.weight"] = (outputs, inputs, side, side)
        out[f"net.slice{layer + 1}.{number}.bias"] = (outputs,)
        out[f"lin{layer}.model.1.weight"] = (1, outputs, 1, 1)
    return out


def load_perceptual(path: Path) -> Perceptual:
    """Return LPIPS by the weights of a safetensors file; names beside the wanted ones are passed over.

    Raises:
        BadInputError: no such file, not one of safetensors, or tensors that are missing or of another shape.
    """
    if not path.is_file():
        raise BadInputError(f"no weights of LPIPS at {path}; docs/case-file.md says how the file is made")
    wanted = perceptual_shapes()
    with stored_tensors(path) as file:
        for name, shape in wanted.items():
            if file.shapes.get(name) != shape:
                raise BadInputError(
                    f"{path} does not hold LPIPS of AlexNet: '{name}' of shape {list(shape)} is missing; "
                    "docs/case-file.md says how the file is made"
                )
        return Perceptual({name: tensor.float() for name, tensor in file.read(wanted, finite=True).items()})
