"""One batch: the client sends its update, the attack reads it, the judge compares."""

import hashlib
import json
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from gradaudit.audit.prepare import Prepared, private_batch
from gradaudit.audit.run_attack import attempt, shareable
from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of, observation
from gradaudit.judge.diagnosis import diagnose
from gradaudit.judge.flags import flags, notes_of
from gradaudit.record import Record, finite
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Observation, Private, Update


def chance(ready: Prepared, batch: Private, index: int) -> torch.Generator:
    """Return the client's random stream for one batch, which nobody who has not the batch can draw again.

    A case's seed is no secret: it is small, most are 0, and the model's own random weights come from it. An attack that
    knew the stream would subtract the noise of a defense and see every dropout mask.
    """
    return stream(ready.case.seed, "client", index, digest(batch))


def digest(batch: Private) -> str:
    """Return the sha256 of all that a private batch holds."""
    found = hashlib.sha256()
    for name, value in vars(batch).items():
        held = value.cpu().contiguous().view(torch.uint8).numpy().tobytes() if isinstance(value, Tensor) else value
        found.update(repr((name, held)).encode())
    return found.hexdigest()


def sent(ready: Prepared, batch: Private, index: int) -> tuple[Update, Observation[Any]]:
    """Return the update of one batch and what the attacker sees of it."""
    update = ready.client.update(batch, chance(ready, batch, index))
    knowledge = knowledge_of(batch, update, ready.case.knowledge.given())
    return update, observation(ready.model, update, ready.selection, knowledge, ready.in_sight)


def audit_batch(ready: Prepared, index: int) -> tuple[Record, BaseModel]:
    """Attack one batch and judge it; an attack's failure becomes a record with `error` and the worst scores.

    Args:
        ready: the prepared case.
        index: 0-based batch.

    Returns:
        The record, and the private side of it.
    """
    case, attack = ready.case, ready.attack
    batch: Private = private_batch(ready, index)
    judge = ready.judge.ordered(ready.client.order(len(batch), chance(ready, batch, index)))
    update, seen = sent(ready, batch, index)
    blind = build("attack", "blind", {})(seen, stream(case.seed, "blind", index))
    baseline = judge.judge(batch, blind)
    tried = attempt(attack, seen, stream(case.seed, "attack", index), partial(judge.judge, batch))
    found, told = tried.found, shareable(attack, tried.found)
    verdict = tried.verdict if tried.verdict is not None else judge.nothing(batch)
    diagnosis = None
    if case.metrics.diagnose and found is not None and tried.verdict is not None and attack.name != "blind":
        plain = Client(ready.model, padding=ready.client.padding)
        diagnosis = diagnose(plain, batch, judge.guessed(batch, found), seen, verdict.solved)
    shape = judge.spectrum(batch, seen)
    known = {"selection": seen.selection, "update": seen.kind} | seen.knowledge.given() | dict(ready.auxiliary)
    record = Record(
        case=case.content_hash(),
        setting=case.setting(),
        batch=index,
        attack=attack.name,
        scores=verdict.scores,
        baseline=baseline.scores,
        batch_size=len(batch),
        seconds=tried.seconds,
        flags=flags(
            own=judge.flags(batch, seen, shape),
            seen=seen,
            made={
                "dropout": update.dropout,
                "defenses": update.defenses,
                "steps": update.training.steps(len(batch)),
                "clients": ready.client.clients,
                "replayed": found is not None and "replayed_steps" in found.details,
            },
            attack=attack if found is None or found.by is None else build("attack", found.by, {}),
            surplus=found is not None and found.count > len(batch),
            scores=verdict.scores,
            baseline=baseline.scores,
            diagnosis=diagnosis,
        ),
        error=tried.error,
        unsupported=tried.unsupported,
        knowledge=json.loads(json.dumps(known)),
        spectrum=shape,
        share_of_parameters=ready.selection.share(ready.model, seen.tensors.values()),
        diagnosis=diagnosis,
        notes=notes_of(told, len(batch)),
        details={k: finite(v) if isinstance(v, float) else v for k, v in told.details.items()} if told else {},
        **judge.load(batch),
        **verdict.of_record(baseline),
    )
    whose = {"case": record.case, "setting": record.setting, "batch": index, "attack": attack.name}
    own = {name: getattr(verdict, name) for name in judge.private.model_fields if name not in whose}
    return record, judge.private.model_validate(whose | own)
