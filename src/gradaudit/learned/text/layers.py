"""A reader that knows an update's layers: what each position's own row says, beside a linear guess at every word.

Ours. LTI throws all coordinates into bins at random, and a network has to find again which of them belong to a
position. Here the gradient of the position table stays as it is, a row a position; the hashed rest gives, by a linear
map, a first guess of the word vector at every position; and one small network, the same at all positions, reads a
position from both, its neighbors' beside its own. An update is then as many examples as it has positions.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradaudit.learned.training import weights_by

_AROUND = 2
"""Positions on either side that are read beside a position's own."""


@dataclass(frozen=True)
class LayeredShape:
    """Sizes of the reader.

    Args:
        inputs: of an update: bins, and behind them the rows of the position table.
        rows: entries of a position's row; 0 where the update has no position table.
        hidden: width of the hidden layers.
        width: of word vectors.
        length: positions.
        classes: words, and one more for "no token here" where sentences differ in length.
    """

    inputs: int
    rows: int
    hidden: int
    width: int
    length: int
    classes: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name."""
        near = (2 * _AROUND + 1) * (self.width + self.rows)
        layers = {
            "linear": (self.length * self.width, self.inputs),
            "reader.near": (self.hidden, near),
            "reader.hidden": (self.hidden, self.hidden),
            "reader.word": (self.width, self.hidden),
            "reader.shared": (self.classes, self.width),
        }
        out: dict[str, tuple[int, ...]] = {"reader.place": (self.length, self.hidden)}
        for name, shape in layers.items():
            out |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return out


class Reader(nn.Module):
    """Reads the words of all positions from first guesses and rows, each position the same way.

    Args:
        shape: its sizes.
    """

    def __init__(self, shape: LayeredShape) -> None:
        super().__init__()
        self.near = nn.Linear((2 * _AROUND + 1) * (shape.width + shape.rows), shape.hidden)
        self.place = nn.Parameter(torch.zeros(shape.length, shape.hidden))
        self.hidden = nn.Linear(shape.hidden, shape.hidden)
        self.word = nn.Linear(shape.hidden, shape.width)
        self.shared = nn.Linear(shape.width, shape.classes)

    def forward(self, told: Tensor) -> Tensor:
        """Return logits [n, 1, T, classes] from what is told of each position, [n, T, width + rows]."""
        padded = F.pad(told, (0, 0, _AROUND, _AROUND))
        length = told.shape[1]
        around = torch.cat([padded[:, at : at + length] for at in range(2 * _AROUND + 1)], -1)
        hidden = F.relu(self.hidden(F.relu(self.near(around) + self.place)))
        out: Tensor = self.shared(self.word(hidden))
        return out[:, None]


class LayeredNetwork(nn.Module):
    """The whole way from a scaled update to the words at every position.

    Args:
        shape: its sizes.
        rng: draws the reader's weights (torch's usual law); None leaves all weights to be loaded.
    """

    def __init__(self, shape: LayeredShape, rng: torch.Generator | None = None) -> None:
        super().__init__()
        self.shape = shape
        with weights_by(None):
            self.linear = nn.Linear(shape.inputs, shape.length * shape.width)
        with weights_by(rng):
            self.reader = Reader(shape)

    def set_linear(self, weights: Tensor, offset: Tensor) -> None:
        """Take the linear guess from a regression's weights [inputs, T * width] and offset."""
        self.linear.weight = nn.Parameter(weights.T.contiguous())
        self.linear.bias = nn.Parameter(offset)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits [n, 1, T, classes] from scaled updates [n, inputs]."""
        out: Tensor = self.reader(self.told(self.linear(features), features))
        return out

    def told(self, guesses: Tensor, features: Tensor) -> Tensor:
        """Return what is told of each position, [n, T, width + rows], from guesses [n, T * width] and updates."""
        s = self.shape
        count = s.length * s.rows
        rows = features[:, features.shape[1] - count :].reshape(len(features), s.length, s.rows)
        return torch.cat([guesses.view(-1, s.length, s.width), rows], -1)
