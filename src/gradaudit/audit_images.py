"""The audit of images: what `audit` does for text, on models, data and scores of images."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gradaudit.attacks.base import Attack
from gradaudit.attempt import attempt
from gradaudit.case import Case
from gradaudit.case_client import check_counters, client_of, earlier_numbers
from gradaudit.client import Client, observation
from gradaudit.data.images import ImageRows, load_images, public_images
from gradaudit.data.source import draw_numbers, found_file
from gradaudit.error_feedback import after_rounds
from gradaudit.errors import BadInputError, MissingKnowledgeError
from gradaudit.judge import notes_of
from gradaudit.judge_images import diagnose_images, image_flags, judge_images
from gradaudit.metrics.perceptual import Perceptual, load_perceptual
from gradaudit.models.base import Model
from gradaudit.models.images import ImageModel, load_image_model
from gradaudit.models.spec import ModelSpec
from gradaudit.record import Pictures, Record, finite
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import ImageBatch, Observation, PublicImages, Reconstruction, Update


@dataclass(frozen=True)
class PreparedImages:
    """A case of images with its model, data and attack at hand; `public` is what the attacker has from elsewhere."""

    case: Case
    model: ImageModel
    rows: ImageRows
    batches: list[tuple[int, ...]]
    client: Client
    selection: Selection
    attack: Attack[ImageModel]
    device: torch.device
    public: PublicImages | None
    perceptual: Perceptual | None = None


def prepare_images(case: Case, base: Path, device: torch.device, loaded: Model | None = None) -> PreparedImages:
    """Load what a case of images names and check that it fits together; see `audit.prepare`.

    The attacker's images are those of [public], or the digits that are in no audited batch where the case audits the
    embedded digits; audited images are never among them.
    """
    attack: Attack[ImageModel] = case.build_attack()
    if case.metrics.published:
        raise BadInputError("[metrics] published names scorings of text; leave it away for images")
    rows = load_images(case.data, base)
    batches = draw_numbers(case.data, len(rows), rows.where)
    public = None
    if case.public is not None:
        public = public_images(load_images(case.public, base), rows, batches, case.public)
    elif case.data.source == "digits" and len(rows) > sum(map(len, batches)):
        public = public_images(rows, rows, batches)
    if "public" in attack.needs and public is None:
        raise MissingKnowledgeError(f"attack '{attack.name}' must be given public: add a [public] table with images")
    spec = ModelSpec(
        case.model,
        case.task,
        max(2, len(rows.classes)),
        seed=case.seed,
        layers=case.layers,
        lora=case.lora.given() if case.lora is not None else None,
        loss=case.loss,
        image=rows.shape,
    )
    model = loaded if isinstance(loaded, ImageModel) else load_image_model(spec, device)
    selection = Selection(case.selection.tensors)
    client = client_of(case, model)
    check_counters(case, attack, client)
    frozen = client.frozen()
    if all(view.parameter in frozen for view in selection.views(model).values()):
        raise BadInputError(f"selection '{selection.expression}' picks only frozen parameters; nothing is sent of them")
    earlier = earlier_numbers(case, client, len(rows), batches)
    client = after_rounds(client, (rows.batch(some) for some in earlier), stream(case.seed, "earlier rounds"))
    weights = case.metrics.lpips
    perceptual = None if weights is None else load_perceptual(found_file(weights, base))
    return PreparedImages(case, model, rows, batches, client, selection, attack, device, public, perceptual)


def sent_images(ready: PreparedImages, batch: ImageBatch, index: int) -> tuple[Update, Observation[ImageModel]]:
    """Return the update of one batch and what the attacker sees of it."""
    update = ready.client.update(batch, stream(ready.case.seed, "client", index))
    knowledge = ready.client.knowledge(batch, update, ready.case.knowledge.given())
    return update, observation(ready.model, update, ready.selection, knowledge, ready.public)


def audit_images(ready: PreparedImages, index: int) -> tuple[Record, Pictures]:
    """Attack one batch of images and judge it; a failure becomes a record with `error` and the worst scores.

    Args:
        ready: the prepared case.
        index: 0-based batch.
    """
    case, model, attack = ready.case, ready.model, ready.attack
    batch = ready.rows.batch(ready.batches[index])
    update, seen = sent_images(ready, batch, index)
    blind = build("attack", "blind", {})(seen, stream(case.seed, "blind", index))
    own = partial(judge_images, batch, perceptual=ready.perceptual)
    baseline = own(blind)
    tried = attempt(attack, seen, stream(case.seed, "attack", index), own)
    found = tried.found
    verdict = tried.verdict if tried.verdict is not None else own(Reconstruction())
    diagnosis = None
    if case.metrics.diagnose and found is not None and tried.verdict is not None and attack.name != "blind":
        diagnosis = diagnose_images(model, batch, seen, found, verdict.alike)
    record = Record(
        case=case.content_hash(),
        setting=case.setting(),
        batch=index,
        attack=attack.name,
        scores=verdict.scores,
        baseline=baseline.scores,
        batch_size=len(batch),
        seconds=tried.seconds,
        flags=image_flags(
            model=model,
            seen=seen,
            made={
                "defenses": update.defenses,
                "steps": update.training.steps(len(batch)),
                "clients": ready.client.clients,
                "replayed": found is not None and "replayed_steps" in found.details,
            },
            attack=attack,
            surplus=found is not None and found.count > len(batch),
            scores=verdict.scores,
            baseline=baseline.scores,
            diagnosis=diagnosis,
        ),
        error=tried.error,
        unsupported=tried.unsupported,
        knowledge=json.loads(json.dumps({"selection": seen.selection, "update": seen.kind} | seen.knowledge.given())),
        share_of_parameters=ready.selection.share(model, seen.tensors.values()),
        diagnosis=diagnosis,
        images=verdict.images,
        images_baseline=baseline.images,
        notes=notes_of(found, len(batch)),
        details={k: finite(v) if isinstance(v, float) else v for k, v in found.details.items()} if found else {},
    )
    pictures = Pictures(
        case=record.case,
        setting=record.setting,
        batch=index,
        attack=attack.name,
        originals=verdict.originals,
        recovered=verdict.recovered,
    )
    return record, pictures
