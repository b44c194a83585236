"""Which failed where the truth was not found: the optimizer or the objective."""

from __future__ import annotations

import math
from typing import Literal

import torch

from gradaudit.client.client import Client
from gradaudit.judge.text import _as_batch, _matched
from gradaudit.metrics.images import align_images
from gradaudit.models.base import Model
from gradaudit.models.images import ImageModel
from gradaudit.models.transformers import TransformersModel
from gradaudit.record import Diagnosis
from gradaudit.streams import stream
from gradaudit.types import Batch, ImageBatch, Observation, Private, Reconstruction


def diagnose(
    model: TransformersModel,
    batch: Batch,
    seen: Observation,
    found: Reconstruction,
    exact: bool,
    padding: Literal["right", "left"] = "right",
) -> Diagnosis:
    """Compare the update of the truth and of the guess with the observed one: which of the two failed?

    Both updates are made with dropout off, as the attacks that ignore dropout assume. The measure is 1 - cosine over
    all seen tensors together, which no scale of a weight change moves.

    Args:
        model: the model.
        batch: the truth.
        seen: what the attack saw.
        found: what it returned.
        exact: every sentence was recovered exactly.
        padding: the client's, which moves positions.
    """
    client = Client(model, padding=padding)
    truth = update_distance(client, batch, seen)
    if not found.sequences:
        return Diagnosis(truth=truth, guess=None, verdict="no guess")
    guess = update_distance(client, _as_batch(model, _matched(model, batch, found), batch), seen)
    verdict: Literal["solved", "optimizer failed", "objective failed"]
    verdict = "solved" if exact else "optimizer failed" if truth < guess else "objective failed"
    return Diagnosis(truth=truth, guess=guess, verdict=verdict)


def update_distance(client: Client, batch: Private, seen: Observation[Model]) -> float:
    """Return 1 - cosine of the update that a client makes of a batch with the observed one, over all seen tensors."""
    update = client.update(batch, stream(0, "diagnose")).tensors
    inner = own = other = 0.0
    for name, view in seen.views.items():
        mine, theirs = view(update[view.parameter]).double(), seen.tensors[name].double()
        inner += float((mine * theirs).sum())
        own += float(mine.square().sum())
        other += float(theirs.square().sum())
    sign = -1.0 if seen.kind == "delta" else 1.0
    return 1.0 - sign * inner / max(math.sqrt(own * other), 1e-300)


def diagnose_images(
    model: ImageModel, batch: ImageBatch, seen: Observation[ImageModel], found: Reconstruction, alike: bool
) -> Diagnosis:
    """Compare the update of the truth and of the guess with the observed one; see `judge.diagnose`.

    Args:
        model: the model.
        batch: the truth.
        seen: what the attack saw.
        found: what it returned.
        alike: every image was recovered.
    """
    client = Client(model)
    truth = update_distance(client, batch, seen)
    nothing = Diagnosis(truth=truth, guess=None, verdict="no guess")
    if found.images is None or len(found.images) == 0:
        return nothing
    images, known = found.images.cpu(), found.labels if found.labels is not None else tuple(batch.labels.tolist())
    places = list(range(len(images)))
    if len(images) > len(batch):  # as in the scores, those that were held against an original
        places = sorted(p.at for p in align_images(batch.images.cpu(), images) if p.at is not None)
    if not places:
        return nothing
    labels = torch.tensor([known[at % len(known)] for at in places])
    guess = update_distance(client, ImageBatch(images[places], labels), seen)
    verdict: Literal["solved", "optimizer failed", "objective failed"]
    verdict = "solved" if alike else "optimizer failed" if truth < guess else "objective failed"
    return Diagnosis(truth=truth, guess=guess, verdict=verdict)
