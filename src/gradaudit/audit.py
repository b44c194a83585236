"""Case -> Record: runs a case batch by batch, keeps what is finished, and goes on where it stopped."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

import gradaudit
from gradaudit.accounting.promised import promised
from gradaudit.arithmetic import multiplied_by
from gradaudit.attacks.base import Attack
from gradaudit.attempt import attempt
from gradaudit.audit_images import PreparedImages, audit_images, prepare_images
from gradaudit.case import Case
from gradaudit.case_client import check_counters, client_of, earlier_numbers
from gradaudit.client import Client, observation
from gradaudit.data.source import Rows, draw, load_rows, make_batch, numbered
from gradaudit.data.windows import windows
from gradaudit.error_feedback import after_rounds
from gradaudit.errors import BadInputError, MissingKnowledgeError
from gradaudit.examples import Private
from gradaudit.fitted_rows import refuse_seen
from gradaudit.fitting import INVERTERS, Data, check_told, digest_of, fitted, public_text
from gradaudit.judge import Judgment, diagnose, flags, judge, notes_of, sentence, spectrum
from gradaudit.learned.kept import learned_in
from gradaudit.learned.manifest import digest_of_inverter
from gradaudit.learned.public import Public
from gradaudit.metrics import text as metrics
from gradaudit.models.base import Model
from gradaudit.models.spec import ModelSpec
from gradaudit.models.transformers import TransformersModel
from gradaudit.models.zoo import head_classes, load_model
from gradaudit.one_writer import only_writer
from gradaudit.record import Pictures, Record, RunInfo, Texts, append_line, finite, read_lines
from gradaudit.registry import build, describe
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Batch, Observation, Update
from gradaudit.unfinished import kept_in
from gradaudit.warm_up import warm_up, warm_up_rows

RECORDS, TEXTS, IMAGES, INFO = "records.jsonl", "texts.jsonl", "images.jsonl", "run.json"


LEARNED = "learned"
"""Folder of what attacks learn from public data."""
UNFINISHED = "unfinished"
"""Folder of what attacks keep of batches they have not finished."""


@dataclass(frozen=True)
class Prepared:
    """A case of text with its model, data and attack at hand."""

    case: Case
    model: TransformersModel
    rows: Rows
    batches: list[tuple[int, ...]]
    client: Client
    selection: Selection
    attack: Attack
    device: torch.device
    public: Public | None = None


def pick_device(name: str) -> torch.device:
    """Return the device of a name; "auto" takes a GPU when there is one.

    Raises:
        BadInputError: an unknown device, or one that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInputError(f"unknown device '{name}'; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInputError("device 'cuda' is not there; use --device cpu or auto")
    if device.type not in ("cpu", "cuda"):
        raise BadInputError(f"device '{name}' is not supported; use auto, cpu or cuda")
    return device


def prepare(
    case: Case, base: Path, device: torch.device, loaded: Model | None = None, read: Rows | None = None
) -> Prepared | PreparedImages:
    """Load what a case names and check that it fits together, before any batch runs.

    Args:
        case: the case.
        base: folder that relative data paths start from.
        device: where the model goes.
        loaded: a model that is already at hand with this case's spec.
        read: the rows of its text source, where they are already at hand.

    Raises:
        BadInputError: data, model or selection that cannot be used.
        MissingKnowledgeError: the attack needs what [knowledge] does not give.
    """
    attack = case.build_attack()
    missing = [need for need in attack.needs if not getattr(case.knowledge, need, True)]
    if missing:
        raise MissingKnowledgeError(
            f"attack '{attack.name}' must be given {', '.join(missing)}: set {missing[0]} = true in [knowledge]"
        )
    if attack.unfitted:
        check_told(case)
    if case.task == "image-classification":
        return prepare_images(case, base, device, loaded)
    return prepare_text(case, base, device, loaded, read)


def prepare_text(
    case: Case, base: Path, device: torch.device, loaded: Model | None = None, read: Rows | None = None
) -> Prepared:
    """Load what a case of text names; see `prepare`."""
    attack = case.build_attack()
    rows = load_rows(case.data, base) if read is None else read
    if case.task == "classification" and rows.labels is None:
        raise BadInputError('task "classification" needs a label column: set label in [data]')
    if case.task == "classification":
        rows = numbered(rows, head_classes(case.model))
    window = case.data.window
    batches = draw(case.data, rows) if window is None else []
    spec = ModelSpec(
        case.model,
        case.task,
        max(2, len(rows.classes)),
        seed=case.seed,
        layers=case.layers,
        lora=case.lora.given() if case.lora is not None else None,
        loss=case.loss,
    )
    model = loaded if isinstance(loaded, TransformersModel) else load_model(spec, device)
    if window is not None:
        rows = windows(rows, model, window, whole=True)
        batches = draw(case.data, rows)
    if loaded is None and spec.lora is not None and spec.lora.warmup:
        warm_up(model, _public_batches(case, model, rows, batches, spec.lora.warmup))
    selection = Selection(case.selection.tensors)
    client = client_of(case, model)
    check_counters(case, attack, client)
    frozen = client.frozen()
    if all(view.parameter in frozen for view in selection.views(model).values()):
        raise BadInputError(f"selection '{selection.expression}' picks only frozen parameters; nothing is sent of them")
    earlier = earlier_numbers(case, client, len(rows.texts), batches)
    client = after_rounds(
        client, (_batch(case, model, rows, some) for some in earlier), stream(case.seed, "earlier rounds")
    )
    public = None
    if case.public is not None:
        public = public_text(case.public, base, model, window, rows, batches)
    return Prepared(case, model, rows, batches, client, selection, attack, device, public)


def _public_batches(
    case: Case, model: TransformersModel, rows: Rows, private: Sequence[tuple[int, ...]], count: int
) -> Iterator[Batch]:
    """Yield batches of rows that are in no private batch, over again where there are few."""
    for numbers in warm_up_rows(case.seed, len(rows.texts), private, count):
        yield _batch(case, model, rows, numbers)


def private_batch(ready: Prepared, index: int) -> Batch:
    """Return the private batch of one index."""
    return _batch(ready.case, ready.model, ready.rows, ready.batches[index])


def _batch(case: Case, model: TransformersModel, rows: Rows, numbers: Sequence[int]) -> Batch:
    labels = None
    if case.task == "classification" and rows.labels is not None:
        labels = [rows.labels[i] for i in numbers]
    ids = None if rows.ids is None else [rows.ids[i] for i in numbers]
    return make_batch(model, [rows.texts[i] for i in numbers], labels, ids)


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


def run(
    ready: Prepared | PreparedImages,
    out: Path,
    each: Callable[[Record], None] | None = None,
    inverters: Path | None = None,
) -> Iterator[Record]:
    """Run a case into a folder and yield every record, those of an earlier run of the same case first.

    A record is on disk before it is yielded. After a kill, the same call goes on with the first missing batch, and with
    what its attack kept of it.

    Args:
        ready: the prepared case.
        out: folder for records.jsonl, texts.jsonl or images.jsonl, and run.json.
        each: called with each new record.
        inverters: where attacks that learn keep what they learned; a folder of the run when None.

    Raises:
        BadInputError: the folder holds records of another case, cannot be written, or another program writes there.
    """
    with only_writer(out), learned_in(out / LEARNED):
        done = open_folder(ready, out)
        named = getattr(ready.attack, "inverter", "")
        if named:
            refuse_seen(Path(named), audited_batches(ready), ready.model)
        if ready.attack.unfitted and len(done) < len(ready.batches):
            place = inverters or out / INVERTERS
            ready = fitted_case(ready, place)
        for index in range(len(ready.batches)):
            if index in done:
                yield done[index]
                continue
            with kept_in(out / UNFINISHED / f"{ready.case.content_hash()[:16]}-{index}.safetensors"):
                record = audited(ready, index, out)
            if each is not None:
                each(record)
            yield record


def audited_batches(ready: Prepared | PreparedImages) -> Iterator[Private]:
    """Yield the private batches of a case."""
    for index, numbers in enumerate(ready.batches):
        yield ready.rows.batch(numbers) if isinstance(ready, PreparedImages) else private_batch(ready, index)


def audited(ready: Prepared | PreparedImages, index: int, out: Path) -> Record:
    """Audit one batch and write down what came of it, the private side first."""
    private: Texts | Pictures
    if isinstance(ready, PreparedImages):
        record, private = audit_images(ready, index)
    else:
        record, private = audit_batch(ready, index)
    append_line(out / (IMAGES if isinstance(private, Pictures) else TEXTS), private, private=True)
    append_line(out / RECORDS, record)
    return record


def fitted_case(ready: Prepared | PreparedImages, folder: Path) -> Prepared | PreparedImages:
    """Return a case whose attack has learned what it needs, into a folder or from what an earlier run left there."""
    case, client, selection = ready.case, ready.client, ready.selection
    check_told(case)
    attack = fitted(ready.attack, client, selection, ready.public, case.data.batch_size, case.seed, folder)
    return replace(ready, attack=attack) if isinstance(ready, Prepared) else replace(ready, attack=attack)  # noqa: RUF034


def open_folder(ready: Prepared | PreparedImages, out: Path, shared: bool = False) -> dict[int, Record]:
    """Make or reopen a run's folder and return the finished records of this case by batch.

    Args:
        ready: the prepared case.
        out: the folder.
        shared: several cases write here (the demo): records of other cases are allowed.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"cannot make folder {out} ({error.strerror}); choose another --out") from None
    mine = ready.case.content_hash()
    _drop_cut_line(out / RECORDS)
    _drop_cut_line(out / TEXTS)
    _drop_cut_line(out / IMAGES)
    records = list(read_lines(out / RECORDS, Record))
    if not shared and any(r.case != mine for r in records):
        raise BadInputError(f"{out} holds records of another case; choose another --out or remove it")
    if not (out / INFO).exists():
        write_info(out, run_info(ready))
    elif not shared and (changed := _changed(ready, out / INFO)):
        if records:
            raise BadInputError(f"the {changed} changed since {out} was begun; choose another --out")
        for half in (out / UNFINISHED).glob(f"{mine[:16]}-*"):
            half.unlink()
        write_info(out, run_info(ready))
    return {r.batch: r for r in records if r.case == mine}


def _changed(ready: Prepared | PreparedImages, path: Path) -> str:
    """Return what is not as it was when a run was begun; empty for nothing."""
    try:
        before = RunInfo.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return ""
    if before.data.get("sha256") not in (None, ready.rows.sha256):
        return "data has"
    for name, value in _digests(ready).items():
        if value is not None and before.data.get(name) not in (None, value):
            return "inverter has" if name == "inverter_sha256" else "[public] data has"
    # adapters that were warmed up differ by rounding from one machine to the next
    warmed = ready.case.lora is not None and ready.case.lora.warmup
    if not warmed and before.model.get("fingerprint") not in (None, ready.model.fingerprint()):
        return "model's weights have"
    return ""


def _drop_cut_line(path: Path) -> None:
    """Cut off a last line that a kill left unfinished, so that the next record starts on a line of its own."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with open(path, "rb+") as file:
            file.truncate(data.rfind(b"\n") + 1)


def run_info(ready: Prepared | PreparedImages, settings: dict[str, str] | None = None) -> RunInfo:
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
        | {name: value for name, value in _digests(ready).items() if value is not None},
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


def _digests(ready: Prepared | PreparedImages) -> dict[str, str | None]:
    """Return hashes of what the attacker has: public data, and what it learned before; None where there is none."""
    public: Data | None = ready.public
    named = getattr(ready.attack, "inverter", "")
    learned = digest_of_inverter(Path(named)) if named else None
    return {"public_sha256": None if public is None else digest_of(public), "inverter_sha256": learned}


def _promises(ready: Prepared | PreparedImages) -> dict[str, str]:
    client, case = ready.client, ready.case
    said = promised(
        [describe(d) for d in client.defenses], client.training.steps(case.data.batch_size), len(client.trained())
    )
    return {} if said is None else {case.setting(): said}


def write_info(out: Path, info: RunInfo) -> None:
    """Write run.json."""
    try:
        (out / INFO).write_text(info.model_dump_json(indent=1), encoding="utf8")
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
    unit = "image" if case.task == "image-classification" else "sentence"
    several = f" of {client.clients} clients" if client.clients > 1 else ""
    on = f"{size} {unit}{'s' * (size > 1)}{several}"
    return f"{what} on {on}, dropout {'on' if client.dropout else 'off'}{frozen}{defended}"


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
