"""Case -> Record: runs a case batch by batch, keeps what is finished, and goes on where it stopped."""

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from gradaudit.audit.batch import audit_batch
from gradaudit.audit.fitted_rows import refuse_seen
from gradaudit.audit.fitting import INVERTERS, fitted
from gradaudit.audit.info import INFO, RECORDS, digests, run_info, write_info
from gradaudit.audit.prepare import Prepared
from gradaudit.errors import BadInputError
from gradaudit.files import append_line, only_writer, read_lines, replacing
from gradaudit.record import Record, RunInfo
from gradaudit.workspace import kept_in, learned_in

LEARNED = "learned"
"""Folder of what attacks learn from public data."""
UNFINISHED = "unfinished"
"""Folder of what attacks keep of batches they have not finished."""


def run(ready: Prepared, out: Path, inverters: Path | None = None) -> Iterator[Record]:
    """Run a case into a folder and yield every record, those of an earlier run of the same case first.

    A record is on disk before it is yielded. After a kill, the same call goes on with the first missing batch, and with
    what its attack kept of it.

    Args:
        ready: the prepared case.
        out: folder for records.jsonl, the private side beside it, and run.json.
        inverters: where attacks that learn keep what they learned; a folder of the run when None.

    Raises:
        BadInputError: the folder holds records of another case, cannot be written, or another program writes there.
    """
    with only_writer(out), learned_in(out / LEARNED):
        done = open_folder(ready, out)
        named = getattr(ready.attack, "inverter", "")
        if named:
            refuse_seen(Path(named), map(ready.rows.batch, ready.batches), ready.model)
        if ready.attack.unfitted and len(done) < len(ready.batches):
            ready = fitted(ready, inverters or out / INVERTERS)
        for index in range(len(ready.batches)):
            if index in done:
                yield done[index]
                continue
            with kept_in(out / UNFINISHED / f"{ready.case.content_hash()[:16]}-{index}.safetensors"):
                record = audited(ready, index, out)
            yield record


def audited(ready: Prepared, index: int, out: Path) -> Record:
    """Audit one batch and write down what came of it, the private side first."""
    record, private = audit_batch(ready, index)
    append_line(out / ready.judge.file, private, private=True)
    append_line(out / RECORDS, record)
    return record


def open_folder(ready: Prepared, out: Path, shared: bool = False) -> dict[int, Record]:
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
    _drop_cut_line(out / ready.judge.file)
    records = list(read_lines(out / RECORDS, Record))
    _drop_unrecorded(out / ready.judge.file, {(r.case, r.batch) for r in records})
    if not shared and any(r.case != mine for r in records):
        raise BadInputError(f"{out} holds records of another case; choose another --out or remove it")
    before = _info(out / INFO)
    if before is None:
        write_info(out, run_info(ready))
    elif not shared and (changed := _changed(ready, before)):
        if records:
            raise BadInputError(f"the {changed} changed since {out} was begun; choose another --out")
        for half in (out / UNFINISHED).glob(f"{mine[:16]}-*"):
            half.unlink()
        write_info(out, run_info(ready))
    return {r.batch: r for r in records if r.case == mine}


def _info(path: Path) -> RunInfo | None:
    """Return what a run's folder says of itself; None where that is missing or damaged, and to be written anew."""
    try:
        return RunInfo.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _changed(ready: Prepared, before: RunInfo) -> str:
    """Return what is not as it was when a run was begun; empty for nothing."""
    if before.data.get("sha256") not in (None, ready.rows.sha256):
        return "data has"
    for name, value in digests(ready).items():
        if value is not None and before.data.get(name) not in (None, value):
            return "inverter has" if name == "inverter_sha256" else "[public] data has"
    # adapters that were warmed up differ by rounding from one machine to the next
    warmed = ready.case.lora is not None and ready.case.lora.warmup
    if not warmed and before.model.get("fingerprint") not in (None, ready.model.fingerprint()):
        return "model's weights have"
    return ""


def _drop_unrecorded(path: Path, done: set[tuple[str, int]]) -> None:
    """Drop the private side of batches whose record was not written (a full disk), which are audited again."""
    if not path.exists():
        return
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if _whose(line) in done]
    if sum(map(len, kept)) == path.stat().st_size:
        return
    try:
        with replacing(path, private=True) as draft:
            draft.write_bytes(b"".join(kept))
    except OSError as error:
        raise BadInputError(f"cannot write {path} ({error.strerror}); make room and run again") from None


def _whose(line: bytes) -> tuple[str, int] | None:
    """Return case and batch of a line; None for one that is none, which no report could read."""
    try:
        found = json.loads(line)
        return str(found["case"]), int(found["batch"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _drop_cut_line(path: Path) -> None:
    """Cut off a last line that a kill left unfinished, so that the next record starts on a line of its own."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with open(path, "rb+") as file:
            file.truncate(data.rfind(b"\n") + 1)
