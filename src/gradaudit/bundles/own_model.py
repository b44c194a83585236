"""A bundle's own copy of the model, written as it was before the step."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gradaudit.bundles.model import MODEL
from gradaudit.bundles.model_files import ADAPTER, CONFIG
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.lora import AdapterConfig, save_adapters
from gradaudit.models.spec import Lora, ModelSpec, Task
from gradaudit.models.transformers import TransformersModel
from gradaudit.models.zoo import load_model, quiet

_MARKS = ("_hf_peft_config_loaded", "hf_quantizer")
"""By which transformers knows of adapters, of its own `add_adapter`, and then saves them alone; and of a base that is
packed, which it then packs anew. A bundle holds the model in plain numbers."""


def text_task(name: str) -> Task:
    """Return what a transformers class is for.

    Args:
        name: of the class, as in a configuration's `architectures`.

    Raises:
        NotSupportedError: neither sequence classification nor causal language modeling.
    """
    if name.endswith("ForSequenceClassification"):
        return "classification"
    if name.endswith(("LMHeadModel", "ForCausalLM")):
        return "causal-lm"
    raise NotSupportedError(
        "a bundle takes a transformers model for sequence classification or causal language modeling, or a LeNet or "
        f"ResNet of gradaudit.models.images, not {name}"
    )


@quiet()
def write_model(
    module: Any, folder: Path, tokenizer: Any, task: Task, before: Mapping[str, Tensor]
) -> TransformersModel:
    """Write a model's weights before the step into a bundle and return the model.

    Args:
        module: a transformers model.
        folder: the bundle.
        tokenizer: the model's.
        task: what the model is for.
        before: its state, by name.

    Raises:
        BadInputError: the folder cannot be written.
    """
    labels = int(module.config.num_labels) if task == "classification" else 1
    name = str(getattr(module.config, "name_or_path", "") or type(module).__name__)
    kept = {mark: getattr(module, mark) for mark in _MARKS if getattr(module, mark, None)}
    try:
        for mark in kept:
            setattr(module, mark, None)
        module.save_pretrained(folder / MODEL, state_dict=dict(before))
        tokenizer.save_pretrained(folder / MODEL)
        config = folder / MODEL / CONFIG
        known = json.loads(config.read_text(encoding="utf8"))
        # Phi's name code on the hub, which nobody who reads this runs; a quantized base was read back to floats
        plain = {key: value for key, value in known.items() if key not in ("auto_map", "quantization_config")}
        if plain != known:
            config.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf8")
    except OSError as error:
        raise BadInputError(f"cannot write the bundle {folder} ({error.strerror}); choose another folder") from None
    finally:
        for mark, value in kept.items():
            setattr(module, mark, value)
    return TransformersModel(module, tokenizer, ModelSpec(name, task, labels))


def write_adapters(
    module: Any, config: AdapterConfig, folder: Path, tokenizer: Any, task: Task, before: Mapping[str, Tensor]
) -> TransformersModel:
    """Write the base and the adapters as they were before the step into a bundle and return the model they make.

    Args:
        module: a transformers model with adapters in it.
        config: what the adapters compute.
        folder: the bundle.
        tokenizer: the model's.
        task: what the model is for.
        before: its state, by names as this package's own models have them.

    Raises:
        BadInputError: the folder cannot be written.
    """
    try:
        base = save_adapters(config, before, folder / MODEL / ADAPTER)
    except OSError as error:
        raise BadInputError(f"cannot write the bundle {folder} ({error.strerror}); choose another folder") from None
    model = write_model(module, folder, tokenizer, task, base)
    lora = Lora(folder=str(folder / MODEL / ADAPTER))
    loaded = load_model(replace(model.spec, name=str(folder / MODEL), lora=lora))
    loaded.spec = replace(model.spec, lora=lora)
    return loaded
