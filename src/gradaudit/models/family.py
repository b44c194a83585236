"""What a family of models tells of itself: where its roles lie, and how to run its first blocks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from gradaudit.models.model import FirstInputs
from gradaudit.models.views import View


class Family(ABC):
    """Role table and block access of one transformers architecture.

    Args:
        module: the transformers model, with its task head.
    """

    causal: bool
    absolute_positions: bool = True
    dropout_before_norm: bool = False
    lost: int = 0
    """Coordinates of a head's query or key whose slopes are always zero: norms behind the matrices take them away."""
    plain_scores: bool = True
    """False where more than a scale stands between products of queries with keys and the softmax."""
    base: str
    """Attribute of the module that holds the model without its head; paths below are inside it."""
    block_list: str
    """Path of the blocks."""
    words: str
    """Path of the word embedding."""
    places: str | None
    """Path of the position embedding; None without."""
    segments: str = ""
    """Path of the embedding of token types; empty without."""
    roles: dict[str, str]
    """Path of the matrix of each role inside a block."""
    head: tuple[str, ...]
    """Prefixes of the parameters outside the base that are the task head."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.config = module.config
        self.core = getattr(module, self.base)
        self.blocks: nn.ModuleList = self.core.get_submodule(self.block_list)
        self.word = f"{self.base}.{self.words}.weight"
        self.position = None if self.places is None else f"{self.base}.{self.places}.weight"

    def views(self, layer: int, role: str) -> list[View]:
        """Return the views of a role (see `TextModel.views`)."""
        return [self._matrix(layer, role, self.roles[role])]

    @abstractmethod
    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return what enters block 0 for [B, T] ids at 0-based [B, T] positions, without dropout."""

    @abstractmethod
    def run_block(
        self, layer: int, hidden: Tensor, mask: Tensor, positions: Tensor, past: Cache | None = None
    ) -> Tensor:
        """Run one block on [B, T, d] with an additive [B, 1, T, T] mask, [B, 1, T, t + T] behind a decoder's past."""

    @abstractmethod
    def first_input_parts(self, longest: int) -> FirstInputs:
        """Return the parts of block 0's inputs for positions 0 to longest - 1."""

    def norm(self, layer: int, hidden: Tensor) -> Tensor:
        """Return what enters q, k, v of a block from what enters the block (pre-norm families normalize)."""
        return hidden

    def position_ids(self, positions: Tensor) -> Tensor:
        """Return the family's own position ids for 0-based positions."""
        return positions

    def attention_bias(self, length: int) -> Tensor | None:
        """Return what is added to all attention scores by position, [heads, T, T]; None for nothing."""
        return None

    def entering(self, vectors: Tensor) -> Tensor:
        """Return what the core takes in place of token ids, from rows of the word embedding [B, T, d]."""
        return vectors

    def next_words(self, hidden: Tensor) -> Tensor:
        """Return a decoder's logits [B, T, V] from its last hidden states [B, T, d]."""
        logits: Tensor = self.module.lm_head(hidden)
        return logits

    def turned(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """Return queries or keys [n, heads, h] as attention compares them at positions [n]: as they are, but rotary."""
        return vectors

    def compared(self, layer: int, role: str, sent: Tensor) -> Tensor:
        """Return queries or keys [n, heads, h] as attention turns and compares them, from what their matrix made."""
        return sent

    def returned(self, layer: int, role: str, sent: Tensor, slopes: Tensor) -> Tensor:
        """Return slopes at what a query's or key's matrix made, from slopes at what attention compares.

        Args:
            layer: block.
            role: "q" or "k".
            sent: [n, heads, h] what the matrix made.
            slopes: [n, heads, t, h], t for each.
        """
        return slopes

    @contextmanager
    def classifying(self) -> Iterator[None]:
        """Leave out, inside the block, rows of the last block that classification does not read."""
        yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let no parameter act, inside the block, on all sentences at once: per-example gradients need it so."""
        yield

    def classify(self, out: Any, mask: Tensor) -> Tensor:
        """Return classification logits from what the core returned (last hidden states [B, T, d])."""
        hidden = out.last_hidden_state
        # the last real token is the pooled one, on whichever side the padding is
        last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
        rows = torch.arange(len(hidden), device=hidden.device)
        logits: Tensor = self.module.score(hidden[rows, last])
        return logits

    def _matrix(self, layer: int, role: str, path: str, part: str = "", **where: Any) -> View:
        name = f"{layer}.{role}" + (f".{part}" if part else "")
        return View(name, f"{self.base}.{self.block_list}.{layer}.{path}.weight", **where)


def hidden_of(out: Any) -> Tensor:  # what a block returned: by itself, or first of several
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first
