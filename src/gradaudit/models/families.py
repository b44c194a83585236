"""One small class a family: where its roles lie, and how to run its first blocks.

The blocks themselves are transformers' own modules; nothing of a model is written again here. To add a family,
add a class with the same attributes and list it in `FAMILIES`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from gradaudit.errors import NotSupportedError
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
    base: str
    """Attribute of the module that holds the model without its head; paths below are inside it."""
    block_list: str
    """Path of the blocks."""
    words: str
    """Path of the word embedding."""
    places: str | None
    """Path of the position embedding; None without."""
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

    def turned(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """Return queries or keys [n, heads, h] as attention compares them at positions [n]: as they are, but rotary."""
        return vectors

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


def _hidden(out: Any) -> Tensor:  # what a block returned: by itself, or first of several
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first


class _EncoderFamily(Family):
    """What BERT and its kin share: post-norm blocks and an embedding module that takes position ids."""

    causal = False
    block_list = "encoder.layer"
    words = "embeddings.word_embeddings"
    places = "embeddings.position_embeddings"
    head: tuple[str, ...] = ("classifier.",)
    first_alone: Sequence[str] = ("attention.output", "intermediate", "output")
    """Modules of a block whose inputs have one row a token, and whose outputs go nowhere else."""
    roles = {  # noqa: RUF012 - read-only table
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "o": "attention.output.dense",
        "f": "intermediate.dense",
        "p": "output.dense",
    }

    def classify(self, out: Any, mask: Tensor) -> Tensor:
        logits: Tensor = self.module.classifier(out.last_hidden_state)
        return logits

    @contextmanager
    def classifying(self) -> Iterator[None]:
        # the heads read the first row alone: of the last block's widest part all others are computed for nothing
        def first_row(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(value[:, :1] for value in inputs)

        places = [self.blocks[-1].get_submodule(path) for path in self.first_alone]
        hooks = [place.register_forward_pre_hook(first_row) for place in places]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.core.embeddings(input_ids=ids, position_ids=self.position_ids(positions))
        return out

    def first_input_parts(self, longest: int) -> FirstInputs:
        table = self.core.embeddings
        words = table.word_embeddings.weight
        if hasattr(table, "token_type_embeddings"):
            words = words + table.token_type_embeddings.weight[0]
        rows = self.position_ids(torch.arange(longest, device=words.device))
        norm = table.LayerNorm
        return FirstInputs(words, table.position_embeddings.weight[rows], norm.weight, norm.bias, norm.eps, True)

    def run_block(
        self, layer: int, hidden: Tensor, mask: Tensor, positions: Tensor, past: Cache | None = None
    ) -> Tensor:
        return _hidden(self.blocks[layer](hidden, mask))


class Bert(_EncoderFamily):
    """BERT: absolute positions, dropout after the embedding LayerNorm, tanh pooler on [CLS]."""

    base = "bert"

    def classify(self, out: Any, mask: Tensor) -> Tensor:
        logits: Tensor = self.module.classifier(self.module.dropout(out.pooler_output))
        return logits


class Electra(_EncoderFamily):
    """ELECTRA's discriminator: BERT's blocks and positions, without a pooler, a two-layer head."""

    base = "electra"

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        if hasattr(self.core, "embeddings_project"):
            raise NotSupportedError(
                "ELECTRA whose embeddings are projected to another width (the small one) is not supported: its blocks "
                "read no rows of the word embedding"
            )


class DistilBert(_EncoderFamily):
    """DistilBERT: BERT's blocks under other names, no token types, a two-layer head on [CLS]."""

    base = "distilbert"
    block_list = "transformer.layer"
    head = ("pre_classifier.", "classifier.")
    first_alone = ("ffn",)
    roles = {role: f"attention.{role}_lin" for role in "qkv"} | {
        "o": "attention.out_lin",
        "f": "ffn.lin1",
        "p": "ffn.lin2",
    }

    def classify(self, out: Any, mask: Tensor) -> Tensor:
        pooled = self.module.pre_classifier(out.last_hidden_state[:, 0]).relu()
        logits: Tensor = self.module.classifier(self.module.dropout(pooled))
        return logits


class Roberta(_EncoderFamily):
    """RoBERTa: BERT's blocks, positions that start after the padding id, a two-layer head."""

    base = "roberta"

    def position_ids(self, positions: Tensor) -> Tensor:
        return positions + int(self.core.embeddings.padding_idx) + 1


class MPNet(Roberta):
    """MPNet: absolute positions and a relative attention bias shared by all blocks."""

    base = "mpnet"
    first_alone = ("intermediate", "output")
    roles = _EncoderFamily.roles | {role: f"attention.attn.{role}" for role in "qkvo"}

    def run_block(
        self, layer: int, hidden: Tensor, mask: Tensor, positions: Tensor, past: Cache | None = None
    ) -> Tensor:
        bias = self.core.encoder.compute_position_bias(hidden)
        return _hidden(self.blocks[layer](hidden, mask, bias))

    def attention_bias(self, length: int) -> Tensor | None:
        table: Tensor = self.core.encoder.relative_attention_bias.weight
        found: Tensor = self.core.encoder.compute_position_bias(table.new_zeros(1, length, 1))
        return found[0]

    @contextmanager
    def apart(self) -> Iterator[None]:
        # the relative bias is looked up once for a batch; here once a sentence, with the same values
        encoder = self.core.encoder

        def bias(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
            steps = torch.arange(hidden.shape[1], device=hidden.device)
            buckets = encoder.relative_position_bucket(steps[None, :] - steps[:, None])
            values: Tensor = encoder.relative_attention_bias(buckets.expand(len(hidden), -1, -1))
            return values.permute(0, 3, 1, 2).contiguous()

        encoder.compute_position_bias = bias
        try:
            yield
        finally:
            del encoder.compute_position_bias


class _DecoderFamily(Family):
    """What GPT-2 and Llama share: blocks that see what came before and normalize what they read."""

    causal = True
    head = ("score.", "lm_head.")
    first_norm: str
    """The normalization before q, k and v, inside a block."""

    def norm(self, layer: int, hidden: Tensor) -> Tensor:
        out: Tensor = self.blocks[layer].get_submodule(self.first_norm)(hidden)
        return out


class GPT2(_DecoderFamily):
    """GPT-2: absolute positions, dropout before the LayerNorm; q, k, v are thirds of one [in, 3 out] matrix."""

    dropout_before_norm = True
    base = "transformer"
    block_list = "h"
    words = "wte"
    places = "wpe"
    first_norm = "ln_1"
    roles = dict.fromkeys("qkv", "attn.c_attn") | {"o": "attn.c_proj", "f": "mlp.c_fc", "p": "mlp.c_proj"}

    def views(self, layer: int, role: str) -> list[View]:
        d = int(self.config.hidden_size)
        rows = ("qkv".index(role) * d, ("qkv".index(role) + 1) * d) if role in "qkv" else None
        return [self._matrix(layer, role, self.roles[role], rows=rows, transpose=True)]

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.core.wte(ids) + self.core.wpe(positions)
        return out

    def first_input_parts(self, longest: int) -> FirstInputs:
        norm: Any = self.blocks[0].ln_1
        positions = self.core.wpe.weight[:longest]
        return FirstInputs(self.core.wte.weight, positions, norm.weight, norm.bias, norm.eps, True)

    def run_block(
        self, layer: int, hidden: Tensor, mask: Tensor, positions: Tensor, past: Cache | None = None
    ) -> Tensor:
        return _hidden(self.blocks[layer](hidden, past, mask))


class Llama(_DecoderFamily):
    """Llama and its kin: rotary positions, grouped keys and values, gated feed-forward (gate and up are both "f")."""

    absolute_positions = False
    base = "model"
    block_list = "layers"
    words = "embed_tokens"
    places = None
    first_norm = "input_layernorm"
    roles = {  # noqa: RUF012 - read-only table
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "f": "mlp.gate_proj",
        "p": "mlp.down_proj",
    }

    def views(self, layer: int, role: str) -> list[View]:
        if role == "f":
            gate, up = self.roles["f"], "mlp.up_proj"
            return [self._matrix(layer, role, gate, "gate"), self._matrix(layer, role, up, "up")]
        return super().views(layer, role)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.core.embed_tokens(ids)
        return out

    def first_input_parts(self, longest: int) -> FirstInputs:
        words: Tensor = self.core.embed_tokens.weight
        norm: Any = self.blocks[0].input_layernorm
        zero = torch.zeros_like(words[:1])
        return FirstInputs(words, zero, norm.weight, zero[0], norm.variance_epsilon, False)

    def turned(self, vectors: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.core.rotary_emb(vectors, position_ids=positions[None])
        both = vectors.transpose(0, 1)[None]
        out: Tensor = apply_rotary_pos_emb(both, both, cos.to(vectors), sin.to(vectors))[0][0]
        return out.transpose(0, 1)

    def run_block(
        self, layer: int, hidden: Tensor, mask: Tensor, positions: Tensor, past: Cache | None = None
    ) -> Tensor:
        rotary = self.core.rotary_emb(hidden, position_ids=positions)
        out = self.blocks[layer](
            hidden, attention_mask=mask, position_ids=positions, past_key_values=past, position_embeddings=rotary
        )
        return _hidden(out)


FAMILIES: dict[str, type[Family]] = {
    "bert": Bert,
    "roberta": Roberta,
    "mpnet": MPNet,
    "electra": Electra,
    "distilbert": DistilBert,
    "gpt2": GPT2,
    "llama": Llama,
    # Llama's blocks, with biases of q, k and v or with a sliding window, which no text that is read is longer than
    "qwen2": Llama,
    "mistral": Llama,
}
"""By transformers' `model_type`."""
_APART = "attention compares content with relative places in products of their own"
_SCALED = "its word vectors are scaled behind the embedding, and its norms add one to their weights"
REFUSED = {
    "deberta": _APART,
    "deberta-v2": _APART,
    "qwen3": "it normalizes each head's queries and keys behind their matrices",
    "gemma": _SCALED,
    "gemma2": _SCALED,
    "gemma3_text": _SCALED,
    "phi": "attention and feed-forward read the same rows side by side, and only a part of each head is rotated",
    "phi3": "its queries, keys and values are one matrix of unequal parts",
}
"""Why others that people ask for are not there: what of them nothing here computes."""


def family_of(name: str, model_type: str) -> type[Family]:
    """Return the family of a transformers model type.

    Args:
        name: of the model, for the message.
        model_type: as its configuration says.

    Raises:
        NotSupportedError: an architecture without a role table.
    """
    if model_type not in FAMILIES:
        why = f" ({REFUSED[model_type]})" if model_type in REFUSED else ""
        raise NotSupportedError(
            f"model '{name}' is of type '{model_type}'{why}; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
