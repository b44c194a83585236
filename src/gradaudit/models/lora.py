"""LoRA through peft: small adapters are trained in place of the matrices they stand beside."""

from typing import Any

import torch

from gradaudit.errors import BadInputError
from gradaudit.models.families import FAMILIES
from gradaudit.models.spec import Lora
from gradaudit.streams import global_stream, stream

_ROLES = {"attention": "qkvo", "all-linear": "qkvofp"}


def add_adapters(module: Any, lora: Lora, seed: int) -> None:
    """Put adapters beside a transformers model's matrices, in place; all but them and the task head is frozen.

    Args:
        module: the model; its forward pass stays its own.
        lora: which adapters.
        seed: A is drawn from it.

    Raises:
        BadInputError: the extra "lora" (package peft) is not installed.
    """
    try:
        import peft
    except ImportError:
        raise BadInputError("LoRA needs the extra: pip install 'gradaudit[lora]'") from None
    family = FAMILIES[module.config.model_type](module)
    views = [
        v for layer in range(len(family.blocks)) for role in _ROLES[lora.modules] for v in family.views(layer, role)
    ]
    names = sorted({view.parameter.removesuffix(".weight") for view in views})
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha if lora.alpha is not None else 2 * lora.rank,
        target_modules=names,
        fan_in_fan_out=any(view.transpose for view in views),
    )
    with global_stream(stream(seed, "lora"), torch.device("cpu")):
        peft.inject_adapter_in_model(config, module)
    for name, p in module.named_parameters():
        if name.startswith(family.head):
            p.requires_grad_(True)
