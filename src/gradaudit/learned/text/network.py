"""LTI's network: hashed update -> hidden -> a hidden vector a position -> one shared layer over the vocabulary."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from gradaudit.learned.training import weights_by


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of the network.

    Args:
        bins: inputs.
        bottleneck: width of the first hidden layer (LTI: 600).
        width: of each position's hidden vector (LTI: 1000).
        sentences: in an update.
        length: positions of a sentence.
        classes: words, and one more for "no token here" where sentences differ in length.
    """

    bins: int
    bottleneck: int
    width: int
    sentences: int
    length: int
    classes: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name."""
        positions = self.sentences * self.length * self.width
        layers = {"first": (self.bottleneck, self.bins), "second": (positions, self.bottleneck)}
        layers["shared"] = (self.classes, self.width)
        out: dict[str, tuple[int, ...]] = {}
        for name, shape in layers.items():
            out |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return out


class Network(nn.Module):
    """The network that maps an update's features to the words at every position.

    Args:
        shape: its sizes.
        rng: draws the weights (torch's usual law); None leaves them to be loaded.
    """

    def __init__(self, shape: NetworkShape, rng: torch.Generator | None = None) -> None:
        super().__init__()
        self.shape = shape
        with weights_by(rng):
            self.first = nn.Linear(shape.bins, shape.bottleneck)
            self.second = nn.Linear(shape.bottleneck, shape.sentences * shape.length * shape.width)
            self.shared = nn.Linear(shape.width, shape.classes)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits [n, B, T, classes] from features [n, bins]."""
        s = self.shape
        hidden = F.relu(self.second(F.relu(self.first(features))))
        out: Tensor = self.shared(hidden.view(-1, s.sentences, s.length, s.width))
        return out


def loss_of(logits: Tensor, targets: Tensor, squared: bool = False) -> Tensor:
    """Return the mean loss over positions; sentences of an update come in any order.

    Args:
        logits: [n, B, T, classes].
        targets: [n, B, T] classes.
        squared: mean squared distance from one-hot vectors in place of cross-entropy.

    Each sentence is held against the slot that the Hungarian method gives it, so that no order has to be learned that
    an update does not show.
    """
    if targets.shape[1] > 1:
        targets = in_slots(logits, targets)
    if squared:
        # sum over classes of (z - onehot)^2 = |z|^2 - 2 z_y + 1, without writing the one-hot vectors
        right = logits.gather(-1, targets[..., None])[..., 0]
        return (logits.square().sum(-1) - 2 * right + 1).mean()
    return F.cross_entropy(logits.flatten(0, 2), targets.flatten())


@torch.no_grad()
def in_slots(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each update's sentences in the order of the slots that they fit best."""
    costs = torch.stack(
        [-logits.log_softmax(-1).gather(-1, t[:, None].expand(logits.shape[:-1])[..., None])[..., 0].sum(-1)
         for t in targets.unbind(1)], -1
    ).cpu()  # fmt: skip
    out = torch.empty_like(targets)
    for n, cost in enumerate(costs):  # [slots, sentences]
        slots, sentences = linear_sum_assignment(cost.numpy())
        out[n, torch.as_tensor(slots)] = targets[n, torch.as_tensor(sentences)]
    return out


@torch.no_grad()
def hits(logits: Tensor, targets: Tensor) -> float:
    """Return the share (0 to 100) of positions with the right class, sentences in their best slots."""
    chosen = targets if targets.shape[1] == 1 else in_slots(logits, targets)
    return 100.0 * float((logits.argmax(-1) == chosen).float().mean())
