"""Tiny models of every family, made on the spot: random weights, three blocks, a hundred plain English words."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerFast

from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of, observation
from gradaudit.data.text import make_batch
from gradaudit.leakage.matching.distances import Distance
from gradaudit.leakage.matching.objective import Objective
from gradaudit.models.spec import ModelSpec
from gradaudit.models.transformers import TransformersModel
from gradaudit.models.zoo import load_model
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Batch, Given, Observation

FAMILIES = ("bert", "roberta", "mpnet", "gpt2", "llama")
ENCODERS = ("bert", "roberta", "mpnet")
DECODERS = ("gpt2", "llama")
SETTINGS = [(family, "classification") for family in FAMILIES] + [(family, "causal-lm") for family in DECODERS]
"""Every (family, task) there is."""
NEWER_DECODERS = ("qwen2", "mistral", "qwen3", "phi", "phi3", "gemma", "gemma2", "gemma3_text")
NEWER = ("electra", "distilbert", *NEWER_DECODERS)
"""Families that share their code with one of those above: what is told apart by family is tested of them, too."""
EVERY = (*FAMILIES, *NEWER)
EVERY_SETTING = [*SETTINGS, *((f, "classification") for f in NEWER), *((f, "causal-lm") for f in NEWER_DECODERS)]
WIDTH, DEPTH, LONGEST = 32, 3, 24

WORDS = (
    "the of and to a in is that it was for on i you he with as be at this "
    "river stone cloud garden window letter doctor teacher farmer sailor blue green quiet heavy bright cold warm "
    "bread water apple paper silver wooden street market kitchen castle island forest winter summer morning evening "
    "walks reads writes sings opens closes carries follows finds loses paints builds "
    "horse rabbit eagle spider mouse tiger whale turtle candle mirror basket bottle hammer ladder pencil pillow "
    "maria peter london paris seven twelve ninety monday friday . , ?"
).split()
MADE_UP = WORDS[20:60]
"""Words of the batches that other batches (see `OTHERS`) never use."""
OTHERS = WORDS[60:100]

_NUMBERS: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": LONGEST},
    "roberta": {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1},
    "mpnet": {"max_position_embeddings": LONGEST + 2},
    "gpt2": {"n_positions": LONGEST},
    "llama": {"max_position_embeddings": LONGEST, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "electra": {"max_position_embeddings": LONGEST, "embedding_size": WIDTH},
    "distilbert": {"max_position_embeddings": LONGEST},
    "qwen2": {"max_position_embeddings": LONGEST, "num_key_value_heads": 2},
    "mistral": {"max_position_embeddings": 2 * LONGEST, "sliding_window": LONGEST, "num_key_value_heads": 2,
                "head_dim": 6},
    "qwen3": {"max_position_embeddings": LONGEST, "num_key_value_heads": 2, "head_dim": 12},
    "phi": {"max_position_embeddings": LONGEST, "num_key_value_heads": 2, "resid_pdrop": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "phi3": {"max_position_embeddings": LONGEST, "num_key_value_heads": 2},
    "gemma": {"max_position_embeddings": LONGEST, "num_key_value_heads": 2, "head_dim": 6},
    "gemma2": {"max_position_embeddings": LONGEST, "num_key_value_heads": 2, "head_dim": 6,
               "final_logit_softcapping": 3.0},
    "gemma3_text": {"max_position_embeddings": LONGEST, "num_key_value_heads": 2, "head_dim": 12,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}  # fmt: skip


def _tokenizer(family: str) -> PreTrainedTokenizerFast:
    pad, unknown, start, end = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    first = [pad, unknown, start, end]
    if family in ("roberta", "mpnet"):
        pad, unknown, start, end = "<pad>", "<unk>", "<s>", "</s>"
        first = [start, pad, end, unknown]
    encoder = family in (*ENCODERS, "electra", "distilbert")
    if not encoder:
        first = [pad, unknown]
    ids = {word: i for i, word in enumerate([*first, *WORDS])}
    inner = Tokenizer(WordLevel(ids, unk_token=unknown))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": pad, "unk_token": unknown}
    if encoder:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{start} $A {end}", special_tokens=[(start, ids[start]), (end, ids[end])]
        )
        names |= {"cls_token": start, "sep_token": end}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def make_folder(family: str, where: Path, inner: int = 48) -> Path:
    """Write config.json and a tokenizer of one tiny family; the weights are drawn on loading ("random:FOLDER").

    Args:
        family: its name.
        where: the folder.
        inner: width of the feed-forwards; real models have 2.7 to 4 times their own width.
    """
    tokenizer = _tokenizer(family)
    numbers = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "intermediate_size": inner,
        "initializer_range": 0.3,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "gpt2":
        renamed = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        numbers = {renamed.get(key, key): value for key, value in numbers.items()} | {"n_inner": inner}
        del numbers["intermediate_size"]
    if family == "distilbert":
        renamed = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        renamed["intermediate_size"] = "hidden_dim"
        numbers = {renamed.get(key, key): value for key, value in numbers.items()}
    tokenizer.save_pretrained(where)
    AutoConfig.for_model(family, **numbers | _NUMBERS[family]).save_pretrained(where)
    return where


def tiny(
    folder: Path, task: str = "classification", labels: int = 2, seed: int = 0, layers: int | None = None
) -> TransformersModel:
    """Return a fresh tiny model; every parameter drawn, so that no bias is zero and no norm is the identity."""
    model = load_model(ModelSpec(f"random:{folder}", task, labels, seed, layers))  # type: ignore[arg-type]
    rng = stream(seed, "biases and norms")
    scale = 0.0 if model.module.config.model_type.startswith("gemma") else 1.0  # Gemma's norms add one themselves
    with torch.no_grad():
        for name, p in model.parameters().items():
            if p.dim() == 1:
                p.copy_(0.2 * torch.randn(p.shape, generator=rng) + (0.0 if name.endswith("bias") else scale))
    return model


def doubled(model: TransformersModel) -> TransformersModel:
    """Return a copy of a model in float64."""
    twin = copy.deepcopy(model)
    twin.module.double()
    return twin


def hidden_states(model: TransformersModel, ids: Tensor, layer: int) -> Tensor:
    """Return what enters q, k, v of a block by running transformers' whole model."""
    kind = model.module.config.model_type
    with torch.no_grad():
        found = model.module(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        entering: Tensor = found.hidden_states[layer]
        if kind == "gpt2":
            return model.module.transformer.h[layer].ln_1(entering)
        return entering if not model.causal else model.module.model.layers[layer].input_layernorm(entering)


def sentences(sizes: Sequence[int], seed: int, words: Sequence[str] = MADE_UP, distinct: bool = True) -> list[str]:
    """Return sentences of so many words each; all words of a batch differ when `distinct`."""
    rng = random.Random(seed)
    if not distinct:
        return [" ".join(rng.choice(words) for _ in range(n)) for n in sizes]
    drawn = iter(rng.sample(list(words), sum(sizes)))
    return [" ".join(next(drawn) for _ in range(n)) for n in sizes]


def batch_of(model: TransformersModel, texts: Sequence[str], labels: Sequence[int] | None = None) -> Batch:
    """Return the batch of some texts, with labels 0, 1, 0, 1, ... unless given."""
    if labels is None:
        labels = [i % model.spec.labels for i in range(len(texts))]
    return make_batch(model, texts, labels)


def seen_of(
    client: Client, batch: Batch, selection: str = "all", given: Given | None = None, seed: int = 0
) -> Observation:
    """Return what an attacker with the usual knowledge sees of a batch."""
    update = client.update(batch, stream(seed, "client"))
    knowledge = knowledge_of(batch, update, given or Given())
    return observation(client.model, update, Selection(selection), knowledge)


def made_by(objective: Objective, vectors: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the update that a batch [B, T, d] causes, by view, as factors make it, written out."""
    causal = objective.model.spec.task == "causal-lm"
    base = objective.base(vectors, mask, labels, None, int(mask[:, 1:].sum()) if causal else len(mask))
    found: dict[str, Tensor] = {}
    for part, beside in zip(objective._parts, base.observed, strict=True):
        own = beside.offset if part.observed.offset is None else beside.offset - part.observed.offset
        values = [own] if part.matrix else list(own)
        found |= {w.name: v.reshape(s) for w, s, v in zip(part.views, part.shapes, values, strict=True)}
    return found


def summed(distance: Distance, predicted: Sequence[Tensor], observed: Sequence[Tensor]) -> Tensor:
    """Return the distance [N] of whole updates, tensor by tensor."""
    total = torch.zeros(len(predicted[0]), dtype=predicted[0].dtype)
    for p, o in zip(predicted, observed, strict=True):
        q = p - o if distance.differs else p.clone()
        total = total + distance.each(q.flatten(1)[:, None], o.reshape(1, -1), False)[0]
    return total * distance.share(len(predicted))


def write_sweep(folder: Path, model: Path, batches: int, tables: str) -> Path:
    """Write six sentences and a sweep over them, and return the sweep's file.

    Args:
        folder: where both go.
        model: folder of the configuration.
        batches: of data.
        tables: the rest of the sweep, as TOML.
    """
    rows = sentences([4, 3, 5, 4, 3, 5], seed=3, distinct=False)
    (folder / "rows.csv").write_text("text,label\n" + "".join(f"{t},{i % 2}\n" for i, t in enumerate(rows)))
    path = folder / "sweep.toml"
    path.write_text(
        f'model = "random:{model}"\n[data]\npath = "rows.csv"\nlabel = "label"\nbatches = {batches}\n{tables}'
    )
    return path
