"""Adapters as they are after some rounds: a few steps on text that no audit is about."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradaudit.models.transformers import TransformersModel
from gradaudit.types import Batch

_RATE = 1e-3
"""Learning rate of the steps: peft's examples train adapters at 1e-4 to 1e-3."""


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
