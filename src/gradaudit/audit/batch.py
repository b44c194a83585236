"""One batch: the client sends its update, the attack reads it, the judge compares."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from gradaudit.audit.prepare import Prepared, PreparedImages, private_batch
from gradaudit.audit.run_attack import attempt
from gradaudit.case import Case
from gradaudit.client.client import observation
from gradaudit.judge.diagnosis import diagnose, diagnose_images
from gradaudit.judge.flags import flags, image_flags, notes_of
from gradaudit.judge.images import judge_images
from gradaudit.judge.spectrum import spectrum
from gradaudit.judge.text import Judgment, judge, sentence
from gradaudit.metrics import text as metrics
from gradaudit.models.images import ImageModel
from gradaudit.record import Pictures, Record, Texts, finite
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Batch, ImageBatch, Observation, Reconstruction, Update


def sent(ready: Prepared, batch: Batch, index: int) -> tuple[Update, Observation]:
    """Return the update of one batch and what the attacker sees of it."""
    update = ready.client.update(batch, stream(ready.case.seed, "client", index))
    knowledge = ready.client.knowledge(batch, update, ready.case.knowledge.given())
    return update, observation(ready.model, update, ready.selection, knowledge)


def audit_batch(ready: Prepared, index: int) -> tuple[Record, Texts]:
    """Attack one batch and judge it; an attack's failure becomes a record with `error` and scores of 0.

    Args:
        ready: the prepared case.
        index: 0-based batch.
    """
    case, model, attack = ready.case, ready.model, ready.attack
    batch = private_batch(ready, index)
    update, seen = sent(ready, batch, index)
    blind = build("attack", "blind", {})(seen, stream(case.seed, "blind", index))
    baseline = judge(model, batch, blind, case.metrics.published)
    tried = attempt(
        attack,
        seen,
        stream(case.seed, "attack", index),
        lambda found: judge(model, batch, found, case.metrics.published),
    )
    found, verdict = tried.found, tried.verdict
    diagnosis = None
    if case.metrics.diagnose and found is not None and verdict is not None and attack.name != "blind":
        diagnosis = diagnose(model, batch, seen, found, verdict.all_exact, ready.client.padding)
    shape = spectrum(seen, batch.tokens)
    scores = (
        verdict.scores
        if verdict is not None
        else metrics.failed_scores([sentence(model, ids) for ids in batch.sequences()])
    )
    record = Record(
        case=case.content_hash(),
        setting=case.setting(),
        batch=index,
        attack=attack.name,
        scores=scores,
        baseline=baseline.scores,
        published=_published(verdict, baseline, case),
        load=batch.tokens / model.width,
        tokens=batch.tokens,
        batch_size=len(batch.ids),
        seconds=tried.seconds,
        flags=flags(
            model=model,
            batch=batch,
            seen=seen,
            made={
                "dropout": update.dropout,
                "defenses": update.defenses,
                "steps": update.training.steps(len(batch.ids)),
                "clients": ready.client.clients,
                "replayed": found is not None and "replayed_steps" in found.details,
            },
            attack=attack,
            found=found,
            scores=scores,
            baseline=baseline.scores,
            diagnosis=diagnosis,
            shape=shape,
        ),
        error=tried.error,
        unsupported=tried.unsupported,
        knowledge=json.loads(
            json.dumps({"selection": seen.selection, "update": seen.kind} | seen.knowledge.given() | _auxiliary(ready))
        ),
        sensitive=verdict.sensitive if verdict is not None else (None if baseline.sensitive is None else 0.0),
        sensitive_baseline=baseline.sensitive,
        certificates=_count(verdict),
        spectrum=shape,
        share_of_parameters=ready.selection.share(model, seen.tensors.values()),
        diagnosis=diagnosis,
        sentences=verdict.sentences if verdict is not None else (),
        notes=notes_of(found, len(batch.ids)),
        details=_numbers(found.details) if found is not None else {},
    )
    shown = verdict if verdict is not None else baseline
    texts = Texts(
        case=record.case,
        setting=record.setting,
        batch=index,
        attack=attack.name,
        originals=shown.originals,
        recovered=shown.recovered if verdict is not None else (None,) * len(shown.originals),
        original_words=shown.original_words,
        recovered_words=shown.recovered_words if verdict is not None else ((),) * len(shown.originals),
    )
    return record, texts


def _auxiliary(ready: Prepared) -> dict[str, Any]:
    """Return what the attacker has beside the update: public text counts as knowledge."""
    return {} if ready.public is None else {"public": {"path": ready.public.where, "rows": len(ready.public)}}


def _published(verdict: Judgment | None, baseline: Judgment, case: Case) -> dict[str, metrics.Scores]:
    zero = {name: dict.fromkeys(values, 0.0) for name, values in baseline.published.items()}
    out: dict[str, metrics.Scores] = {}
    for name in case.metrics.published:
        out[name] = verdict.published[name] if verdict is not None else dict(zero[name])
        out[f"{name} (blind)"] = baseline.published[name]
    return out


def _count(verdict: Judgment | None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in verdict.sentences if verdict is not None else ():
        if row.certificate is not None:
            counts[row.certificate] = counts.get(row.certificate, 0) + 1
    return counts


def _numbers(details: Any) -> dict[str, Any]:
    return {k: finite(v) if isinstance(v, float) else v for k, v in details.items()}


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
