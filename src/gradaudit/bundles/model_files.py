"""The files of a model inside a bundle: looked at before transformers reads them, and refused where they could harm.

Only files of known names, inside the folder and no links; only known keys of a configuration, within bounds; a
tokenizer that cannot make much of little. What is refused was made by no `gradaudit.capture`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradaudit import files
from gradaudit.errors import BadInputError

CONFIG, INDEX, ADAPTER = "config.json", "model.safetensors.index.json", "adapter"
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_LARGEST = {
    CONFIG: 1 << 20,
    "generation_config.json": 1 << 20,
    INDEX: 1 << 24,
    "tokenizer.json": 1 << 26,
    "tokenizer_config.json": 1 << 22,
    "special_tokens_map.json": 1 << 20,
    "added_tokens.json": 1 << 22,
    "vocab.json": 1 << 24,
    "vocab.txt": 1 << 24,
    "merges.txt": 1 << 24,
    "chat_template.jinja": 1 << 20,
}
"""Bytes of each file that a model's folder may have beside its weights: twice what the largest known models have."""
_OF_ADAPTERS = {"adapter_config.json": 1 << 20, "adapter_model.safetensors": 1 << 40}
_KEYS = frozenset(
    """
    _model_name_or_path _name_or_path _sliding_window_pattern activation activation_function add_cross_attention
    architectures attention_bias attention_dropout attention_probs_dropout_prob attn_logit_softcapping attn_pdrop
    bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout cls_token_id dim dropout dtype
    embd_pdrop embedding_size eos_token_id final_logit_softcapping finetuning_task generator_size gradient_checkpointing
    head_dim hidden_act hidden_activation hidden_dim hidden_dropout_prob hidden_size id2label initializer_range
    intermediate_size is_decoder is_encoder_decoder label2id layer_norm_eps layer_norm_epsilon layer_types mask_token_id
    max_position_embeddings max_window_layers mlp_bias model_type n_ctx n_embd n_head n_heads n_inner n_layer n_layers
    n_positions num_attention_heads num_hidden_layers num_key_value_heads num_labels original_max_position_embeddings
    output_attentions output_hidden_states output_past pad_token_id partial_rotary_factor position_embedding_type
    pretraining_tp problem_type qa_dropout qk_layernorm query_pre_attn_scalar relative_attention_num_buckets
    reorder_and_upcast_attn resid_pdrop return_dict rms_norm_eps rope_local_base_freq rope_parameters rope_scaling
    rope_theta scale_attn_by_inverse_layer_idx scale_attn_weights sep_token_id seq_classif_dropout sinusoidal_pos_embds
    sliding_window sliding_window_pattern summary_activation summary_first_dropout summary_last_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params tie_word_embeddings torch_dtype
    torchscript transformers_version type_vocab_size unk_token_id use_bidirectional_attention use_cache
    use_sliding_window vocab_size
    """.split()
)
"""Keys of `config.json` of the families that are read (transformers 4 and 5); none names code, a path or a kernel."""
_MOST = {
    "num_labels": 100_000,
    "num_hidden_layers": 1000,
    "n_layer": 1000,
    "n_layers": 1000,
    "chunk_size_feed_forward": 0,
}
_LARGEST_NUMBER = 1 << 24
"""Of any key that has no bound of its own: no vocabulary, width or length is above it."""
_NORMALIZERS = frozenset(
    "BertNormalizer Lowercase NFC NFD NFKC NFKD Nmt Prepend Replace Sequence Strip StripAccents ByteLevel".split()
)
_GROWTH, _FRAME, _PADDED = 16, 64, 1 << 16
"""Characters that a normalizer or decoder may make of one; tokens of a frame; tokens that a text is filled up to."""


def check_model_files(folder: Path) -> None:
    """Refuse a model's folder that could read elsewhere, take memory that its files do not justify, or run code.

    Args:
        folder: that transformers would read next.

    Raises:
        BadInputError: names the file and what is wrong with it.
    """
    for path in sorted(folder.iterdir()):
        if path.name == ADAPTER and path.is_dir() and not path.is_symlink():
            for inner in sorted(path.iterdir()):
                _check_file(inner, _OF_ADAPTERS.get(inner.name))
        else:
            _check_file(path, 1 << 50 if _SHARD.fullmatch(path.name) else _LARGEST.get(path.name))
    _check_config(folder / CONFIG)
    for path in folder.glob("*.safetensors"):
        with files.stored_tensors(path):  # whole, and a header that can be read
            pass
    if (folder / INDEX).is_file():
        _check_index(folder / INDEX)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"):
        if (folder / name).is_file():
            _check_named_files(folder / name)
    if (folder / "tokenizer.json").is_file():
        _check_tokenizer(folder / "tokenizer.json")


def _check_file(path: Path, most: int | None) -> None:
    if most is None:
        raise BadInputError(f"{path} is no file of a captured model; remove it, or name a model with --model")
    if path.is_symlink() or not path.is_file():
        raise BadInputError(f"{path} is a link or no plain file; not read")
    if path.stat().st_size > most:
        raise BadInputError(f"{path} is larger than any such file ({path.stat().st_size >> 20} MiB); not read")


def _table(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(f"{path} cannot be read ({error or 'nested too deep'})") from None
    if not isinstance(found, dict):
        raise BadInputError(f"{path} is not a JSON object")
    return found


def _check_config(path: Path) -> None:
    if not path.is_file():
        raise BadInputError(f"the model's folder {path.parent} has no {CONFIG}")
    found = _table(path)
    strange = sorted(found.keys() - _KEYS)
    if strange:
        raise BadInputError(
            f"{path} has the key '{strange[0]}', which no model that is read needs; remove it, or use --model"
        )
    for key, value in found.items():
        for number in _numbers(value):
            if not abs(number) <= _MOST.get(key, _LARGEST_NUMBER):
                raise BadInputError(f"{path}: {key} = {number!s:.20} is out of bounds")


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in a value of JSON."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)


def _check_index(path: Path) -> None:
    where = _table(path).get("weight_map")
    if not isinstance(where, dict):
        raise BadInputError(f"{path} has no table weight_map")
    for name in where.values():
        if not isinstance(name, str) or not _SHARD.fullmatch(name) or not (path.parent / name).is_file():
            raise BadInputError(f"{path} names weights that are not in its folder: {name!r:.80}")


def _check_named_files(path: Path) -> None:
    for key, value in _table(path).items():
        if key == "auto_map" or (key.endswith("_file") and value is not None):
            raise BadInputError(f"{path} has the key '{key}', which names code or a file elsewhere; remove it")


def _check_tokenizer(path: Path) -> None:
    found = _table(path)
    for part in _parts(found.get("normalizer"), "normalizers"):
        if part.get("type") not in _NORMALIZERS:
            raise BadInputError(f"{path} has a normalizer of type {part.get('type')!r:.40}, which is not read")
    for stage, inner in (("normalizer", "normalizers"), ("decoder", "decoders")):
        grown = 1
        for part in _parts(found.get(stage), inner):
            grown *= max(1, *(len(str(part.get(key, ""))) for key in ("content", "prepend")))
        if grown > _GROWTH:
            raise BadInputError(f"{path} has a {stage} that makes {grown} characters of one; not read")
    for part in _parts(found.get("post_processor"), "processors"):
        if any(_frame(part, name) > _FRAME for name in ("single", "pair")):
            raise BadInputError(f"{path} puts more than {_FRAME} tokens around a text; not read")
    padding = found.get("padding")
    if isinstance(padding, dict) and any(
        not number <= _PADDED for key in ("strategy", "pad_to_multiple_of") for number in _numbers(padding.get(key))
    ):
        raise BadInputError(f"{path} fills texts up to more than {_PADDED} tokens; not read")


def _parts(part: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yield a stage of a tokenizer, or those that a sequence of them holds."""
    if isinstance(part, dict):
        held = part.get(inner)
        if part.get("type") == "Sequence" and isinstance(held, list):
            for one in held:
                yield from _parts(one, inner)
        else:
            yield part


def _frame(part: Mapping[str, Any], name: str) -> int:
    """Return how many tokens a template puts around a text."""
    pieces, tokens = part.get(name), part.get("special_tokens")
    if not isinstance(pieces, list):
        return 0
    total = len(pieces)
    for piece in pieces:
        told = piece.get("SpecialToken") if isinstance(piece, dict) else None
        token = tokens.get(str(told.get("id"))) if isinstance(told, dict) and isinstance(tokens, dict) else None
        ids = token.get("ids") if isinstance(token, dict) else None
        total += len(ids) if isinstance(ids, list) else 0
    return total
