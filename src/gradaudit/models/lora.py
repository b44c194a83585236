"""LoRA through peft: small adapters are trained in place of the matrices they stand beside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from gradaudit.errors import BadInputError
from gradaudit.models.families import FAMILIES
from gradaudit.streams import global_stream, stream
from gradaudit.types import Batch

if TYPE_CHECKING:
    from gradaudit.models.transformers import TransformersModel

_ROLES = {"attention": "qkvo", "all-linear": "qkvofp"}
_RATE = 1e-3
"""Learning rate of the warm-up steps: peft's examples train adapters at 1e-4 to 1e-3."""


@dataclass(frozen=True)
class Lora:
    """Adapters: y = W x + alpha / rank B A x, of which A [rank, in], B [out, rank] and the task head are trained.

    Args:
        rank: r.
        alpha: scale; None takes 2 r.
        modules: "attention" (q, k, v, o of every block) or "all-linear" (and the feed-forward).
        warmup: steps of AdamW on rows that are in no audited batch, before the update. peft begins with B = 0, and
            then A has no gradient: a first update gives nothing away that later ones do not.
    """

    rank: int = 8
    alpha: float | None = None
    modules: Literal["attention", "all-linear"] = "attention"
    warmup: int = 0

    @property
    def title(self) -> str:
        """The name shown to people."""
        after = f", after {self.warmup} steps" if self.warmup else ""
        return f"LoRA r = {self.rank} on {self.modules}{after}"


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


def warm_up(model: TransformersModel, batches: Iterable[Batch]) -> None:
    """Train the adapters a step on each batch, in place, dropout off.

    Args:
        model: a model with adapters.
        batches: of public text.
    """
    fixed = set(model.untrained())
    trained = [p for name, p in model.parameters().items() if name not in fixed]
    optimizer = torch.optim.AdamW(trained, lr=_RATE)
    for batch in batches:
        ids, mask = batch.ids.to(model.device), batch.mask.to(model.device)
        labels = ids if batch.labels is None else batch.labels.to(model.device)
        loss = model.loss(ids=ids, mask=mask, labels=labels)
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        for p, g in zip(trained, found, strict=True):
            p.grad = g
        optimizer.step()
        optimizer.zero_grad()
    model.weights_changed()
