"""Names a user may write for a model, and how each becomes a `TransformersModel`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch

from gradaudit.errors import BadInputError, broken_by, unknown_name
from gradaudit.models import packages
from gradaudit.models.families import family_of
from gradaudit.models.images import IMAGE_MODELS
from gradaudit.models.lora import add_adapters
from gradaudit.models.spec import ModelSpec
from gradaudit.models.state import fit_in
from gradaudit.models.transformers import TransformersModel
from gradaudit.streams import global_stream, stream


@dataclass(frozen=True)
class Embedded:
    """A model with real weights that comes from a package."""

    folder: Callable[[], Path]
    about: str


@dataclass(frozen=True)
class Shape:
    """An architecture without trained weights, by the numbers of its configuration."""

    model_type: str
    about: str
    config: dict[str, Any]


EMBEDDED: dict[str, Embedded] = {
    "minilm": Embedded(packages.minilm_folder, "MiniLM-L6, BERT architecture, 6 x 384, 22.7M, real weights"),
    "smollm2": Embedded(
        packages.smollm2_folder, "SmolLM2-135M, Llama architecture, 30 x 576, real weights (extra: smollm2)"
    ),
    "mpnet": Embedded(packages.mpnet_folder, "MPNet, 12 x 768, 110M, real weights (404 MB once)"),
}


def _sizes(blocks: int, width: int, heads: int, inner: int) -> dict[str, Any]:
    return {"num_hidden_layers": blocks, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner}


_BERT = {"vocab_size": 30522}
_GPT2 = {"vocab_size": 50257}
_ROBERTA = {"vocab_size": 50262, "max_position_embeddings": 514, "type_vocab_size": 1}
_GROUPED = {"num_key_value_heads": 2, "max_position_embeddings": 1024}
SHAPES: dict[str, Shape] = {
    "bert-tiny": Shape("bert", "BERT, 2 x 128", _BERT | _sizes(2, 128, 2, 512)),
    "bert-base": Shape("bert", "BERT, 12 x 768", _BERT),
    "bert-large": Shape("bert", "BERT, 24 x 1024", _BERT | _sizes(24, 1024, 16, 4096)),
    "roberta-base": Shape("roberta", "RoBERTa, 12 x 768, GPT-2's vocabulary", _ROBERTA),
    "gpt2": Shape("gpt2", "GPT-2, 12 x 768", _GPT2),
    "gpt2-large": Shape("gpt2", "GPT-2 large, 36 x 1280", _GPT2 | {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "llama-small": Shape(
        "llama", "Llama, 8 x 512 with grouped keys, GPT-2's vocabulary", _GPT2 | _GROUPED | _sizes(8, 512, 8, 1376)
    ),
}
RANDOM = "random:"
_MOST_BLOCKS = 1000
"""Of a model: no architecture has nearly as many, and each takes time and memory before anything is read."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep loading bars, reports of the (intended) fresh head and hints at kernels out of the user's terminal."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    packing = getLogger("bitsandbytes")  # peft imports it where it is installed
    hints = packing.level
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    packing.setLevel(ERROR)
    try:
        yield
    finally:
        packing.setLevel(hints)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@quiet()
def load_model(spec: ModelSpec, device: torch.device | None = None) -> TransformersModel:
    """Return the model a spec names: embedded, "random:SHAPE", "random:FOLDER", a local folder, or a hub id.

    A fresh classification head is drawn from the spec's seed, so the same spec gives the same weights everywhere.

    Args:
        spec: name, task, number of labels, seed, number of blocks, adapters.
        device: where to put the weights; the CPU when None.

    Raises:
        BadInputError: no such model, or its files cannot be read.
        NotSupportedError: an architecture without a role table.
    """
    with broken_by(f"model '{spec.name}'"):
        return _loaded(spec, device)


def _loaded(spec: ModelSpec, device: torch.device | None) -> TransformersModel:
    name = spec.name
    depth: int | None = None
    if name.startswith(RANDOM):
        if spec.loaded is not None:
            raise BadInputError("a random model is made as a whole: leave --blocks away")
        module, tokenizer = _random(spec, name.removeprefix(RANDOM))
        spec = replace(spec, random_weights=True)
    elif name in EMBEDDED:
        module, tokenizer, depth = _pretrained(spec, str(EMBEDDED[name].folder()))
    elif Path(name).is_dir():
        module, tokenizer, depth = _pretrained(spec, name)
    elif "/" in name or Path(name).suffix:
        if Path(name).exists() or name.startswith((".", "/", "~")):
            raise BadInputError(f"model '{name}' is not a folder with a transformers model in it")
        module, tokenizer, depth = _pretrained(spec, name)
    elif name.partition(":")[0] in IMAGE_MODELS:
        raise BadInputError(f"model '{name}' reads images: set task = \"image-classification\"")
    else:
        raise unknown_name("model", name, [*EMBEDDED, *(RANDOM + shape for shape in SHAPES)])
    if spec.lora is not None:
        add_adapters(module, spec.lora, spec.seed, depth)
    fit_in(module, spec.weights)
    if device is not None:
        module = module.to(device)
    return TransformersModel(module, tokenizer, spec, depth)


def _configure(config: Any, task: str, labels: int, blocks: int | None) -> None:
    """Set classes and blocks of a configuration."""
    if task == "classification":
        config.num_labels = labels
    if blocks is not None:
        if blocks > _MOST_BLOCKS:
            raise BadInputError(f"a model of {blocks} blocks is not made; at most {_MOST_BLOCKS}")
        setattr(config, "n_layer" if config.model_type == "gpt2" else "num_hidden_layers", blocks)


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or else its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _auto(task: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if task == "classification" else AutoModelForCausalLM


def _pretrained(spec: ModelSpec, where: str) -> tuple[Any, Any, int]:
    """Return model, tokenizer and how many blocks it has, of which not all need be loaded."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        _check_family(spec, config.model_type)
        depth = int(config.num_hidden_layers)
        asked = max(spec.layers or 0, spec.loaded or 0)
        if asked > depth:
            raise BadInputError(f"model '{spec.name}' has {depth} blocks, and {asked} were asked for")
        _configure(config, spec.task, spec.labels, spec.loaded if spec.loaded is not None else spec.layers)
        tokenizer = _with_padding(AutoTokenizer.from_pretrained(where, trust_remote_code=False))
        config.pad_token_id = tokenizer.pad_token_id
        with global_stream(stream(spec.seed, "model"), torch.device("cpu")):
            module = _auto(spec.task).from_pretrained(
                where, config=config, attn_implementation="eager", use_safetensors=True, dtype=torch.float32
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BadInputError(
            f"model '{spec.name}' could not be loaded ({first_line(error)}); "
            f"use an embedded name ({', '.join(EMBEDDED)}), a local folder or a reachable hub id"
        ) from None
    return module, tokenizer, spec.layers if spec.layers is not None else depth


def head_classes(name: str) -> tuple[str, ...] | None:
    """Return what a model's trained classification head calls its classes, in order; None where it has none.

    Args:
        name: as in a case: a folder or a hub id; embedded models and random shapes have no such head.
    """
    # what can be neither a folder nor a hub id is refused when it is loaded, and must not be asked of the hub
    if name in EMBEDDED or name.startswith(RANDOM) or not (Path(name).is_dir() or "/" in name):
        return None
    from transformers import AutoConfig

    try:
        with broken_by(name):
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            headed = any(str(one).endswith("ForSequenceClassification") for one in config.architectures or ())
            return tuple(str(config.id2label[n]) for n in range(config.num_labels)) if headed else None
    except BadInputError:
        return None  # loading it says why


def whole_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters of a model by name, its adapters' too, without its weights.

    Args:
        spec: an embedded name, a folder or a hub id.

    Raises:
        BadInputError: its configuration cannot be read, or its adapters are of another model.
    """
    with broken_by(f"the configuration of model '{spec.name}'"):
        module = without_weights(spec)
    if spec.lora is not None:
        add_adapters(module, spec.lora, spec.seed)
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def without_weights(spec: ModelSpec) -> Any:
    """Return the module of a model whose tensors have shapes and take no memory; whatever transformers raises.

    Args:
        spec: an embedded name, a folder or a hub id.
    """
    from transformers import AutoConfig

    where = str(EMBEDDED[spec.name].folder()) if spec.name in EMBEDDED else spec.name
    config = AutoConfig.from_pretrained(where, trust_remote_code=False)
    _check_family(spec, config.model_type)
    _configure(config, spec.task, spec.labels, spec.layers)
    with quiet(), torch.device("meta"):
        return _auto(spec.task).from_config(config)


def _random(spec: ModelSpec, shape: str) -> tuple[Any, Any]:
    from transformers import AutoConfig

    folder = Path(shape)
    if folder.is_dir():
        from transformers import AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(shape, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(shape, trust_remote_code=False)
        except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
            raise BadInputError(f"model '{spec.name}' has no readable config and tokenizer ({error})") from None
    elif shape in SHAPES:
        known = SHAPES[shape]
        config = AutoConfig.for_model(known.model_type, **known.config)
        tokenizer = _tokenizer_for(known.model_type)
    else:
        raise unknown_name("model", spec.name, [*(RANDOM + s for s in SHAPES), *EMBEDDED])
    _check_family(spec, config.model_type)
    tokenizer = _with_padding(tokenizer)
    if config.model_type != "mpnet" and config.model_type != "roberta":
        config.pad_token_id = tokenizer.pad_token_id
    _configure(config, spec.task, spec.labels, spec.layers)
    with global_stream(stream(spec.seed, "model"), torch.device("cpu")):
        module = _auto(spec.task).from_config(config, attn_implementation="eager")
    return module, tokenizer


def _check_family(spec: ModelSpec, model_type: str) -> None:
    family = family_of(spec.name, model_type)
    if spec.task == "causal-lm" and not family.causal:
        raise BadInputError(
            f"model '{spec.name}' is an encoder ({model_type}); task 'causal-lm' needs a decoder, as gpt2 or llama"
        )


def _tokenizer_for(model_type: str) -> Any:
    from transformers import AutoTokenizer, GPT2Tokenizer, RobertaTokenizer

    if model_type == "bert":
        return AutoTokenizer.from_pretrained(str(packages.minilm_folder()))
    folder = packages.gpt2_vocabulary_folder()
    merges = str(folder / "merges.txt")
    if model_type != "roberta":
        return GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=merges)
    # RoBERTa's own vocabulary is not to be had in a package: GPT-2's, moved up behind RoBERTa's first ids
    frame = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    words = json.loads((folder / "vocab.json").read_text(encoding="utf8"))
    vocabulary = {word: i for i, word in enumerate(frame)} | {w: i + len(frame) for w, i in words.items()}
    return RobertaTokenizer(vocab=vocabulary, merges=merges)


def _with_padding(tokenizer: Any) -> Any:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
