"""What a model is to this program: its parameters, its roles, and pure functions of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradaudit.models.spec import ModelSpec
from gradaudit.models.state import fingerprint_of, remember
from gradaudit.models.views import View


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that carry no text and never score, and the frame the tokenizer puts around a sentence."""

    ids: frozenset[int]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad: int


Weights = Mapping[str, Tensor]
"""Parameters by name."""
Past = Sequence[tuple[Tensor, Tensor]]
"""Keys and values by block, each [B, heads, T, width of a head]."""


@dataclass(frozen=True)
class FirstInputs:
    """Block 0's inputs in parts: x(t, p) = weight * normalize(words[t] + positions[p]) + bias.

    Written apart, the whole vocabulary at every position costs one matrix product instead of one a position.

    Args:
        words: [V, d], token type included.
        positions: [P, d] by 0-based position; one row of zeros for rotary models.
        weight: [d] scale of the normalization.
        bias: [d] shift, zeros for RMS norms.
        eps: the normalization's.
        centered: True for LayerNorm (the mean is taken off), False for RMS norm.
        unit_rounded: True where low precision rounds before the weight, too (Llama's norm), and not at the end alone.
        scale: what words were multiplied by behind their table (Gemma): low precision rounds it, and the product.
    """

    words: Tensor
    positions: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    centered: bool
    unit_rounded: bool = False
    scale: float = 1.0

    def low(self, position: int, ids: Tensor, kind: torch.dtype) -> Tensor:
        """Return what a model enters whose weights are of a type of few digits, which every step rounds to: [n, d].

        Args:
            position: 0-based.
            ids: [n] token ids.
            kind: the type; weights are taken to fit in it.
        """
        place = self.positions[position if len(self.positions) > 1 else 0]
        words = (self.words[ids] / self.scale).to(kind) * torch.tensor(self.scale).to(place).to(kind)
        plain = (words + place.to(kind)).float()
        centered = plain - plain.mean(1, keepdim=True) if self.centered else plain
        unit = centered * (centered.square().mean(1, keepdim=True) + self.eps).rsqrt()
        if self.unit_rounded:
            return self.weight.to(kind) * unit.to(kind)
        return (self.weight * unit + self.bias).to(kind)


class Model(ABC):
    """What models of text and of images have in common: named parameters, and state that attacks must not change.

    Args:
        module: what computes; its parameters are the model's, and those without a gradient no client trains.
        spec: how it was made.
    """

    spec: ModelSpec
    width: int
    """Text: of the residual stream, the most tokens a span can tell apart. Images: features before the last layer."""
    depth: int
    """Text: blocks. Images: layers before the last one."""

    def __init__(self, module: Any, spec: ModelSpec) -> None:
        self.spec = spec
        self.module = module.eval()
        self._parameters: dict[str, Tensor] = dict(module.named_parameters())
        self._untrained = tuple(name for name, p in self._parameters.items() if not p.requires_grad)
        self._fingerprint: str | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self._parameters.values())).device

    def parameters(self) -> dict[str, Tensor]:
        """Return every parameter by name (shared, not copied; never write into them)."""
        return dict(self._parameters)

    def untrained(self) -> tuple[str, ...]:
        """Return the names of the parameters that no client trains: all but adapters and head, where there are any."""
        return self._untrained

    @abstractmethod
    def views(self, layer: int, role: str) -> list[View]:
        """Return the views of one role of one block: one, or two for gated feed-forwards ("f")."""

    @abstractmethod
    def group(self, name: str) -> list[str]:
        """Return the parameter names of a group: "embeddings" (word and position), "word", "position", "head"."""

    @abstractmethod
    def training_mode(self, rate: float | None = None) -> AbstractContextManager[None]:
        """Turn dropout on inside the block, at the rates the model is configured with or at one rate everywhere."""

    @abstractmethod
    def dropout_rate(self) -> float:
        """Return the largest dropout rate the model is configured with (0.0: training mode changes nothing)."""

    def weights_changed(self) -> None:
        """Forget what was computed from the weights."""
        self._fingerprint = None

    def remember(self) -> Callable[[], bool]:
        """Note mode, flags and hooks; the returned function puts them back and says whether any had changed.

        Gradients that were left on the parameters are cleared, which is no change: an attack may use `.backward()`.
        """
        return remember(self.module)

    def fingerprint(self) -> str:
        """Return the sha256 of all weights, which names the model a bundle was made with."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(self._parameters)
        return self._fingerprint
