"""Families of encoders, one small class each; blocks are transformers' own modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from gradaudit.errors import NotSupportedError
from gradaudit.models.family import Family, hidden_of
from gradaudit.models.model import FirstInputs


class _EncoderFamily(Family):
    """What BERT and its kin share: post-norm blocks and an embedding module that takes position ids."""

    causal = False
    block_list = "encoder.layer"
    words = "embeddings.word_embeddings"
    places = "embeddings.position_embeddings"
    segments = "embeddings.token_type_embeddings"
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
        return hidden_of(self.blocks[layer](hidden, mask))


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
        alike = bool((positions == positions[:1]).all())
        return hidden_of(self.blocks[layer](hidden, mask, self._bias(positions[:1] if alike else positions)))

    def _bias(self, positions: Tensor) -> Tensor:
        """Return what is added to the scores by how far apart positions [B, T] are, [B, heads, T, T]."""
        encoder = self.core.encoder
        buckets = encoder.relative_position_bucket(positions[:, None, :] - positions[:, :, None])
        values: Tensor = encoder.relative_attention_bias(buckets)
        return values.permute(0, 3, 1, 2).contiguous()

    def attention_bias(self, length: int) -> Tensor | None:
        table: Tensor = self.core.encoder.relative_attention_bias.weight
        found: Tensor = self.core.encoder.compute_position_bias(table.new_zeros(1, length, 1))
        return found[0]

    @contextmanager
    def apart(self) -> Iterator[None]:
        # the relative bias is looked up once for a batch; here once a sentence, with the same values
        encoder = self.core.encoder

        def bias(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
            return self._bias(torch.arange(hidden.shape[1], device=hidden.device).expand(len(hidden), -1))

        encoder.compute_position_bias = bias
        try:
            yield
        finally:
            del encoder.compute_position_bias
