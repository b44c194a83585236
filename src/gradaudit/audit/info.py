"""What a run's folder says of itself."""

import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import gradaudit
from gradaudit.accounting.promised import promised
from gradaudit.audit.fitting import digest_of
from gradaudit.audit.prepare import Prepared
from gradaudit.case import Case
from gradaudit.errors import BadInputError
from gradaudit.files import replacing
from gradaudit.learned.manifest import digest_of_inverter
from gradaudit.machine import multiplied_by
from gradaudit.models.spec import kind_of
from gradaudit.record import RunInfo
from gradaudit.scores import SCORES

RECORDS, TEXTS, IMAGES, INFO = "records.jsonl", "texts.jsonl", "images.jsonl", "run.json"
"""Files of a run's folder: for everyone, the private side of text and of images, and what the run says of itself."""


def usual_folder(case: Case, name: str) -> Path:
    """Return where a run goes when nobody says: by its hash, so that another setting does not meet its records."""
    return Path("out") / f"{name}-{case.content_hash()[:8]}"


def run_info(ready: Prepared, settings: dict[str, str] | None = None) -> RunInfo:
    """Return what the run's folder says of itself."""
    model, case = ready.model, ready.case
    return RunInfo(
        program=gradaudit.__version__,
        case=case.content_hash(),
        case_data=case.resolved(),
        model={
            "title": model.spec.title,
            "spec": asdict(model.spec),
            "fingerprint": model.fingerprint(),
            "width": model.width,
            "depth": model.depth,
            "parameters": sum(p.numel() for p in model.parameters().values()),
            "random_weights": model.spec.random_weights,
        },
        data={"where": ready.rows.where, "sha256": ready.rows.sha256, "rows": len(ready.rows)}
        | {name: value for name, value in digests(ready).items() if value is not None},
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "numpy")},
            "float32 products": multiplied_by(),
        },
        device=str(ready.device),
        settings=settings if settings is not None else {case.setting(): describe_client(case)},
        promises=_promises(ready),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def digests(ready: Prepared) -> dict[str, str | None]:
    """Return hashes of what the attacker has: public data, and what it learned before; None where there is none."""
    public = ready.public
    named = getattr(ready.attack, "inverter", "")
    learned = digest_of_inverter(Path(named)) if named else None
    return {"public_sha256": None if public is None else digest_of(public), "inverter_sha256": learned}


def _promises(ready: Prepared) -> dict[str, str]:
    client, case = ready.client, ready.case
    said = promised(client.defenses, client.training.steps(case.data.batch_size), len(client.trained()))
    return {} if said is None else {case.setting(): said}


def write_info(out: Path, info: RunInfo) -> None:
    """Write run.json, whole or not at all.

    Raises:
        BadInputError: the disk refuses; what was there before stays.
    """
    try:
        with replacing(out / INFO) as draft:
            draft.write_text(info.model_dump_json(indent=1), encoding="utf8")
    except OSError as error:
        raise BadInputError(f"cannot write {out / INFO} ({error.strerror})") from None


def describe_client(case: Case) -> str:
    """Return one line on what the client did."""
    client = case.client
    what = (
        "one gradient"
        if client.optimizer == "none"
        else f"{client.epochs} epoch{'s' * (client.epochs > 1)} of {client.optimizer} at {client.learning_rate:g}"
    )
    frozen = f", frozen: {', '.join(client.freeze)}" if client.freeze else ", everything trained"
    defended = f", defenses: {', '.join(str(d['name']) for d in case.defense)}" if case.defense else ""
    size = case.data.batch_size
    unit = SCORES[kind_of(case.task)].example
    several = f" of {client.clients} clients" if client.clients > 1 else ""
    on = f"{size} {unit}{'s' * (size > 1)}{several}"
    return f"{what} on {on}, dropout {'on' if client.dropout else 'off'}{frozen}{defended}"
