"""LTI's network for images: a multilayer perceptron from an update's numbers to pixels."""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from gradaudit.learned.training import weights_by


@dataclass(frozen=True)
class ImageNetworkShape:
    """Sizes of the network.

    Args:
        inputs: numbers of an update.
        width: of each hidden layer (LTI: 3000).
        hidden: how many of them (LTI: 3).
        batch_size: images an update.
        image: channels, height and width.
    """

    inputs: int
    width: int
    hidden: int
    batch_size: int
    image: tuple[int, int, int]

    @property
    def pixels(self) -> int:
        """Numbers of an image."""
        channels, height, width = self.image
        return channels * height * width

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name."""
        sizes = [self.inputs, *[self.width] * self.hidden, self.batch_size * self.pixels]
        out: dict[str, tuple[int, ...]] = {}
        for layer, (before, after) in enumerate(pairwise(sizes)):
            out |= {f"layers.{layer}.weight": (after, before), f"layers.{layer}.bias": (after,)}
        return out


class ImageNetwork(nn.Module):
    """Maps the scaled numbers of updates to their images.

    Args:
        shape: its sizes.
        rng: draws the weights (torch's usual law); None leaves them to be loaded.
    """

    def __init__(self, shape: ImageNetworkShape, rng: torch.Generator | None = None) -> None:
        super().__init__()
        self.shape = shape
        weights = [s for n, s in shape.tensors().items() if n.endswith("weight")]
        with weights_by(rng):
            self.layers = nn.ModuleList(nn.Linear(before, after) for after, before in weights)

    @torch.no_grad()
    def begin_with(self, mean: Tensor) -> None:
        """Let the network begin with one image for all updates: the mean of the public ones, [C, H, W]."""
        weights = dict(self.layers[-1].named_parameters())
        weights["weight"].mul_(0.1)
        weights["bias"].copy_(mean.flatten().repeat(self.shape.batch_size))

    def forward(self, numbers: Tensor) -> Tensor:
        """Return images [n, B, C, H, W], not yet limited to 0 to 1, from scaled numbers [n, inputs]."""
        hidden = numbers
        for layer in self.layers[:-1]:
            hidden = F.relu(layer(hidden))
        out: Tensor = self.layers[-1](hidden)
        return out.view(-1, self.shape.batch_size, *self.shape.image)


def in_slots(made: Tensor, images: Tensor) -> Tensor:
    """Return each update's images in the order of the slots that they fit best, both [n, B, C, H, W].

    An update does not show the order of its images, so none has to be learned (ours).
    """
    if images.shape[1] == 1:
        return images
    with torch.no_grad():
        costs = torch.cdist(made.flatten(2), images.flatten(2)).square().cpu()
        rows = [torch.as_tensor(linear_sum_assignment(cost.numpy())[1]) for cost in costs]
    return torch.stack([one[row] for one, row in zip(images, rows, strict=True)])
