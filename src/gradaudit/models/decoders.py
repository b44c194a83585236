"""Families of decoders, one small class each; blocks are transformers' own modules."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from gradaudit.errors import NotSupportedError
from gradaudit.models.family import Family, hidden_of
from gradaudit.models.model import FirstInputs
from gradaudit.models.views import View


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
        return hidden_of(self.blocks[layer](hidden, past, mask))


class Llama(_DecoderFamily):
    """Llama and its kin: rotary positions, grouped keys and values, gated feed-forward (gate and up are both "f")."""

    absolute_positions = False
    base = "model"
    block_list = "layers"
    words = "embed_tokens"
    places = None
    first_norm = "input_layernorm"
    head_norms: Mapping[str, str] = {}
    """Path of the norm behind the queries' and behind the keys' matrix, head by head."""
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
        return FirstInputs(words, zero, norm.weight, zero[0], norm.variance_epsilon, False, unit_rounded=True)

    def rotary(self, layer: int, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, T, turned coordinates] by which a block turns queries and keys."""
        found: tuple[Tensor, Tensor] = self.core.rotary_emb(like, position_ids=positions)
        return found

    def turned(self, vectors: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (part.to(vectors) for part in self.rotary(0, vectors, positions[None]))
        both = vectors.transpose(0, 1)[None]
        first, rest = both[..., : cos.shape[-1]], both[..., cos.shape[-1] :]  # some turn a part of each head
        out = torch.cat([apply_rotary_pos_emb(first, first, cos, sin)[0], rest], -1)[0]
        return out.transpose(0, 1)

    def compared(self, layer: int, role: str, sent: Tensor) -> Tensor:
        if role not in self.head_norms:
            return sent
        norm: Any = self.blocks[layer].get_submodule(self.head_norms[role])
        out: Tensor = norm(sent.to(norm.weight)).to(sent)
        return out

    def returned(self, layer: int, role: str, sent: Tensor, slopes: Tensor) -> Tensor:
        if role not in self.head_norms:
            return slopes
        each = sent[:, :, None] + torch.zeros_like(slopes)
        with torch.enable_grad():
            back = torch.func.vjp(lambda some: self.compared(layer, role, some), each)[1]
            out: Tensor = back(slopes.expand_as(each))[0]
        return out.detach()

    def run_block(
        self, layer: int, hidden: Tensor, mask: Tensor, positions: Tensor, past: Cache | None = None
    ) -> Tensor:
        rotary = self.rotary(layer, hidden, positions)
        out = self.blocks[layer](
            hidden, attention_mask=mask, position_ids=positions, past_key_values=past, position_embeddings=rotary
        )
        return hidden_of(out)


class Qwen3(Llama):
    """Qwen3: Llama's blocks with an RMS norm of each head's query and key."""

    head_norms: Mapping[str, str] = {"q": "self_attn.q_norm", "k": "self_attn.k_norm"}
    lost = 1


class Phi3(Llama):
    """Phi-3 and Phi-4: Llama's blocks; queries, keys and values are parts of one matrix, gate and up are halves."""

    roles = Llama.roles | dict.fromkeys("qkv", "self_attn.qkv_proj") | {"f": "mlp.gate_up_proj"}

    def views(self, layer: int, role: str) -> list[View]:
        config = self.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes = {"q": config.num_attention_heads * head} | dict.fromkeys("kv", config.num_key_value_heads * head)
        if role == "f":
            sizes = dict.fromkeys(("gate", "up"), config.intermediate_size)
        if role not in (*sizes, "f"):
            return super().views(layer, role)
        ends = list(accumulate(sizes.values()))
        rows = dict(zip(sizes, zip([0, *ends], ends, strict=False), strict=True))
        parts = {role: ""} if role in sizes else {part: part for part in sizes}
        return [self._matrix(layer, role, self.roles[role], part, rows=rows[one]) for one, part in parts.items()]


class Phi(Llama):
    """Phi-1, 1.5 and 2: LayerNorm before attention and feed-forward, which read the same rows; part of a head turns."""

    roles = Llama.roles | {"o": "self_attn.dense", "f": "mlp.fc1", "p": "mlp.fc2"}

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        if self.config.embd_pdrop:
            raise NotSupportedError("Phi with dropout of its word vectors (embd_pdrop) is not supported: set it to 0")
        if self.config.qk_layernorm:
            self.head_norms = {"q": "self_attn.q_layernorm", "k": "self_attn.k_layernorm"}
            self.lost = 2

    def views(self, layer: int, role: str) -> list[View]:
        return [self._matrix(layer, role, self.roles[role])]

    def first_input_parts(self, longest: int) -> FirstInputs:
        words: Tensor = self.core.embed_tokens.weight
        norm: Any = self.blocks[0].input_layernorm
        return FirstInputs(words, torch.zeros_like(words[:1]), norm.weight, norm.bias, norm.eps, True)


class Gemma(Llama):
    """Gemma: Llama's blocks, word vectors that are scaled behind their table, norms whose weights count from 1."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        if getattr(self.config, "use_bidirectional_attention", None):
            raise NotSupportedError("a Gemma that sees what comes after a word is not supported")

    def entering(self, vectors: Tensor) -> Tensor:
        scale: Tensor = self.core.embed_tokens.embed_scale.to(vectors)
        return vectors * scale

    def first_input_parts(self, longest: int) -> FirstInputs:
        table: Any = self.core.embed_tokens
        norm: Any = self.blocks[0].input_layernorm
        zero = torch.zeros_like(table.weight[:1])
        words = self.entering(table.weight)
        return FirstInputs(words, zero, 1.0 + norm.weight, zero[0], norm.eps, False, scale=float(table.embed_scale))

    def next_words(self, hidden: Tensor) -> Tensor:
        logits = super().next_words(hidden)
        most = getattr(self.config, "final_logit_softcapping", None)
        return logits if most is None else most * (logits / most).tanh()


class Gemma2(Gemma):
    """Gemma 2: norms behind attention and feed-forward, too; the scores of attention are bent towards a bound."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.plain_scores = self.config.attn_logit_softcapping is None


class Gemma3(Gemma):
    """Gemma 3's text part: norms of heads as Qwen3 has, and positions turned otherwise in blocks of a short window."""

    head_norms = Qwen3.head_norms
    lost = Qwen3.lost

    def rotary(self, layer: int, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.core.rotary_emb(like, positions, self.config.layer_types[layer])
        return found
