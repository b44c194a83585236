"""What a model is to this program: its parameters, its roles, and pure functions of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradaudit.models.spec import ModelSpec
from gradaudit.models.state import fingerprint_of, remember
from gradaudit.models.taps import Dropout, Traced
from gradaudit.models.views import View


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that carry no text and never score, and the frame the tokenizer puts around a sentence."""

    ids: frozenset[int]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad: int


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
    """

    words: Tensor
    positions: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    centered: bool


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


class TextModel(Model):
    """A text model as pure functions of its parameters; implemented for transformers in `models.transformers`.

    Every function takes `params` by name (the model's own when None), so that attacks and local training never
    write into the module. Positions count from 0 for every family.
    """

    special: SpecialTokens
    causal: bool
    """True for decoders: a token sees only those before it."""
    absolute_positions: bool
    """True when block 0's input depends on the position (BERT, GPT-2), False for relative ones (RoPE)."""
    dropout_before_norm: bool
    """True when dropout acts on the embeddings before block 0's normalization (GPT-2), False after it (BERT)."""
    vocabulary_size: int
    max_length: int
    first_position_row: int
    """Row of the position table that position 0 uses (RoBERTa and MPNet start at 2)."""

    @abstractmethod
    def logits(
        self,
        *,
        ids: Tensor | None = None,
        embeddings: Tensor | None = None,
        mask: Tensor,
        params: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return [B, classes] (classification) or [B, T, V] (causal-lm) logits.

        Args:
            ids: [B, T] token ids, or
            embeddings: [B, T, d] word vectors in their place.
            mask: [B, T], 1 where a token is real; padding on one side (decoders: either, encoders: the right).
            params: parameters to use in place of the model's own.
        """

    @abstractmethod
    def loss(
        self,
        *,
        ids: Tensor | None = None,
        embeddings: Tensor | None = None,
        mask: Tensor,
        labels: Tensor,
        params: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the mean loss the client trains with (`spec.loss`).

        Args:
            labels: [B] classes or [B, C] distributions (classification); [B, T] ids or [B, T, V] distributions
                (causal-lm), of which position t is predicted from position t - 1 and the first one is not used.
        """

    @abstractmethod
    def traced(
        self,
        *,
        embeddings: Tensor,
        mask: Tensor,
        labels: Tensor,
        watch: Sequence[str],
        dropout: Dropout | None = None,
        rate: float | None = None,
    ) -> Traced:
        """Return the loss of each sentence and where the watched parameters' gradients come from.

        Args:
            embeddings: [n, T, d] word vectors.
            mask: [n, T].
            labels: as `loss` takes them.
            watch: parameter names.
            dropout: takes the place of every dropout site; None runs without dropout.
            rate: dropout rate at every site; None takes the configured ones.

        Returns:
            Losses whose mean (classification), or whose sum over the number of predicted tokens (causal-lm), is `loss`.
        """

    @abstractmethod
    def word_vectors(self) -> Tensor:
        """Return the [V, d] word embedding table."""

    @abstractmethod
    def first_inputs(self, position: int, ids: Tensor | None = None) -> Tensor:
        """Return what enters q, k, v of block 0 for each token at one position, [n, d].

        Args:
            position: 0-based position of the token.
            ids: [n] token ids; the whole vocabulary when None.
        """

    @abstractmethod
    def first_input_parts(self) -> FirstInputs:
        """Return the parts that `first_inputs` is made of."""

    def attention_inputs(
        self,
        layer: int,
        ids: Tensor,
        positions: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> Tensor:
        """Return what enters q, k, v of block `layer`, [B, T, d], running only the blocks before it.

        Args:
            layer: 0-based block.
            ids: [B, T] token ids, no padding unless `allowed` hides it.
            positions: [B, T] positions; 0, 1, 2, ... when None.
            allowed: [B, T, T] bool, True where row t may attend to column s; the family's own pattern when None.
        """
        return self.matrix_inputs([(layer, "q")], ids, positions, allowed)[0]

    @abstractmethod
    def matrix_inputs(
        self,
        wanted: Sequence[tuple[int, str]],
        ids: Tensor,
        positions: Tensor | None = None,
        allowed: Tensor | None = None,
        past: Past = (),
    ) -> list[Tensor]:
        """Return what enters some matrices, each [B, T, in], from one pass through the blocks that they need.

        Args:
            wanted: (block, role) pairs.
            ids, positions: as `attention_inputs` takes them.
            allowed: as there; [B, T, t + T] behind a past of t tokens.
            past: a decoder's keys and values of t tokens before these, of all blocks that run (`attended`).
        """

    @abstractmethod
    def attended(self, blocks: int, ids: Tensor, start: int = 0, past: Past = ()) -> Past:
        """Return a decoder's keys and values of the first blocks, for later tokens to attend to.

        Args:
            blocks: so many.
            ids: [B, T] token ids.
            start: position of the first token of all.
            past: keys and values of t tokens before these; the result holds them too.
        """

    @abstractmethod
    def after_attention(self, layer: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Return what an encoder's block makes of rows whose attention is at hand, [N, d].

        Args:
            layer: block.
            hidden: [N, d] what enters it at these rows.
            mixed: [N, d] values mixed by attention, what enters its output matrix.
        """

    @abstractmethod
    def attention_bias(self, length: int) -> Tensor | None:
        """Return what a model adds to all attention scores by position, [heads, T, T]; None for nothing."""

    @abstractmethod
    def project(self, layer: int, role: str, rows: Tensor) -> Tensor:
        """Return a block's q, k or v of some input rows by head, [n, heads, width of a head], in the rows' dtype."""

    @abstractmethod
    def encode(self, text: str) -> tuple[list[int], bool]:
        """Return a text's token ids with special tokens, cut to the longest the model takes, and whether it was cut."""

    @abstractmethod
    def tokens(self, text: str) -> list[int]:
        """Return a text's token ids with special tokens, however long it is."""

    @property
    @abstractmethod
    def unknown(self) -> int | None:
        """The token that stands for what the vocabulary does not hold, where that is no special token; None without."""

    @abstractmethod
    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """Return the text of token ids, special tokens left out."""

    @abstractmethod
    def content(self, ids: list[int] | tuple[int, ...]) -> list[int]:
        """Return the ids that carry text: special tokens left out (an unknown-word token is text)."""

    @abstractmethod
    def pieces(self, ids: list[int] | tuple[int, ...]) -> list[str]:
        """Return one readable string a token, for the report's word marks."""
