"""Families of decoders, one small class each; blocks are transformers' own modules."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

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
        return hidden_of(out)
