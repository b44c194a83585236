"""How much of an update a reconstruction explains: what an attacker can say of a guess without the truth."""

from typing import Any

import torch
from torch import Tensor

from gradaudit.errors import AuditError
from gradaudit.leakage.matching.similarity import Likeness
from gradaudit.leakage.observed import as_gradient
from gradaudit.models.base import TextModel
from gradaudit.models.images import ImageModel
from gradaudit.types import Observation, Reconstruction

_MOST_TRIED = 64
"""Sentences times classes whose labels are found by trying; of larger batches the labels would cost too much time."""


def explained(seen: Observation[Any], found: Reconstruction) -> float | None:
    """Return the cosine, -1 to 1, between the update that a reconstruction would cause and the one that was seen.

    Labels that nobody recovered are tried sentence by sentence.

    Args:
        seen: the observation.
        found: what an attack recovered.

    Returns:
        None where it cannot be said: nothing was found, more than the batch holds, or the update is no gradient's.
    """
    size = seen.knowledge.batch_size
    if not found.count or (size is not None and found.count > size):
        return None
    try:
        if isinstance(seen.model, TextModel):
            return _text(seen, found)
        return _images(seen, found) if isinstance(seen.model, ImageModel) else None
    except AuditError:
        return None  # steps of AdamW, or nothing but words' rows: no gradient to compare with


def _text(seen: Observation[TextModel], found: Reconstruction) -> float | None:
    device = next(iter(seen.model.parameters().values())).device
    longest = max(map(len, found.sequences))
    ids = torch.zeros(found.count, longest, dtype=torch.long, device=device)
    mask = torch.zeros(found.count, longest, dtype=torch.bool, device=device)
    for row, sentence in enumerate(found.sequences):
        ids[row, : len(sentence)] = torch.tensor(sentence, device=device)
        mask[row, : len(sentence)] = True
    judge = Likeness(seen, "auto")

    def like(labels: Tensor | None) -> float:
        return float(judge(ids[None], mask[None], None if labels is None else labels[None])[0])

    if seen.model.spec.task == "causal-lm":
        return like(None)
    classes = seen.model.spec.labels
    if found.labels is not None:
        return like(torch.tensor(found.labels, device=device))
    if found.count * classes > _MOST_TRIED:
        return None
    labels = torch.zeros(found.count, dtype=torch.long, device=device)
    best = like(labels)
    for row in range(found.count):
        for label in range(1, classes):
            tried = labels.clone()
            tried[row] = label
            if (value := like(tried)) > best:
                best, labels = value, tried
    return best


def _images(seen: Observation[ImageModel], found: Reconstruction) -> float | None:
    if found.images is None or found.labels is None or not found.images.isfinite().all():
        return None
    images = found.images.to(next(iter(seen.model.parameters().values())))
    labels = torch.tensor(found.labels, device=images.device)
    parameters, observed = seen.model.parameters(), as_gradient(seen)
    names = sorted({view.parameter for view in seen.views.values()})
    with torch.enable_grad():
        loss = seen.model.loss(images, labels)
        made = dict(zip(names, torch.autograd.grad(loss, [parameters[name] for name in names]), strict=True))
    mine = {name: view(made[view.parameter]) for name, view in seen.views.items()}
    inner = torch.stack([(mine[name] * value).sum() for name, value in observed.items()]).sum()
    return float(inner / (_norm(mine) * _norm(observed)).clamp_min(1e-30))


def _norm(tensors: dict[str, Tensor]) -> Tensor:
    return torch.stack([t.square().sum() for t in tensors.values()]).sum().sqrt()
