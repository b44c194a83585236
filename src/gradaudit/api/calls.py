"""The commands `run` and `attack` as functions."""

import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from gradaudit.api.outcome import Outcome
from gradaudit.audit.info import TEXTS, usual_folder
from gradaudit.audit.prepare import pick_device, prepare
from gradaudit.audit.run import run as run_prepared
from gradaudit.bundles.checkpoints import refuse_checkpoints
from gradaudit.bundles.examine import examine
from gradaudit.case import assign, load_case, parse_case
from gradaudit.catalog import starter
from gradaudit.errors import BadInputError
from gradaudit.files import read_lines
from gradaudit.machine import sparing_threads
from gradaudit.metrics.summary import summarize
from gradaudit.record import Record, Texts, readers
from gradaudit.verdict.run import verdict


def run(
    case: str | Path | Mapping[str, Any],
    *,
    text: str | None = None,
    label: str | None = None,
    model: str | None = None,
    attack: str | None = None,
    budget: float | None = None,
    settings: Sequence[str] = (),
    out: str | Path | None = None,
    device: str = "auto",
) -> Outcome:
    """Audit a case: attack every batch and judge it; the same call goes on after a stop.

    Args:
        case: a case's TOML file, its tables as a dict, or a data file, of which the case of `gradaudit init` is taken.
        text, label: columns of a data file.
        model, attack: names in place of the case's; the attack at its defaults.
        budget: seconds that `auto` may take for a batch; 120 when None.
        settings: "attack.steps=100" overrides of the case, after these.
        out: folder for the records; `out/NAME-HASH` when None.
        device: "auto", "cpu" or "cuda".

    Raises:
        BadInputError: anything about the case that does not fit, before any batch runs.
    """
    name, base = ("case", Path()) if isinstance(case, Mapping) else (Path(case).stem, Path(case).resolve().parent)
    is_case = isinstance(case, Mapping) or Path(case).suffix == ".toml"
    if is_case and (text is not None or label is not None):
        raise BadInputError("text and label name columns of a data file; a case names its own in [data]")
    named = {"model": model, "attack": attack and f'{{name="{attack}"}}', "attack.budget": budget}
    settings = (*(f"{key}={value}" for key, value in named.items() if value is not None), *settings)
    if not isinstance(case, Mapping) and is_case:
        asked = load_case(Path(case), settings)
    else:
        tables = (
            deepcopy(dict(case)) if isinstance(case, Mapping) else tomllib.loads(starter(Path(case), text, label, base))
        )
        for setting in settings:
            assign(tables, setting)
        asked = parse_case(tables)
    folder = usual_folder(asked, name) if out is None else Path(out)
    with sparing_threads():
        records = list(run_prepared(prepare(asked, base, pick_device(device)), folder))
    private = {one.batch: one for one in read_lines(folder / TEXTS, Texts)}
    return Outcome(
        attack=readers(records),
        verdict=verdict(summarize(records), records).sentence,
        notes=(
            *sorted({record.error for record in records if record.error}),
            *dict.fromkeys(note for record in records for note in record.notes),
        ),
        folder=folder,
        table=tuple(row for record in records for row in _judged(record, private.get(record.batch))),
    )


def _judged(record: Record, texts: Texts | None) -> list[dict[str, Any]]:
    """Return the rows of one batch; none where its texts are not there (images, or a failed batch)."""
    if texts is None:
        return []
    return [
        {
            "batch": record.batch,
            "original": original,
            "recovered": recovered,
            "certificate": marks.certificate,
            "rougeL": marks.rougeL,
            "exact": marks.exact,
        }
        for original, recovered, marks in zip(texts.originals, texts.recovered, record.sentences, strict=False)
    ]


def attack(
    bundle: str | Path,
    attack: str | None = None,
    *,
    settings: Sequence[str] = (),
    budget: float | None = None,
    selection: str = "all",
    model: str | None = None,
    seed: int = 0,
    device: str = "auto",
) -> Outcome:
    """Attack an update bundle that you are entitled to examine; no truth is needed.

    Args:
        bundle: folder made by `gradaudit.capture`, `gradaudit.bundle` or a recorder.
        attack: its name; `auto` when None.
        settings: "steps=100" overrides of the attack's fields.
        budget: seconds that `auto` may take; 120 when None.
        selection: which gradients the attacker sees.
        model: a model name in place of the bundle's.
        seed: of the attack's random stream.
        device: "auto", "cpu" or "cuda".

    Raises:
        BadInputError: anything about the bundle or the names that does not fit.
        NotSupportedError: the attack cannot handle a defense of the update.
        BrokenDownError: the attack ended in an error of its own.
    """
    refuse_checkpoints([Path(bundle)])
    settings = (*settings, *(() if budget is None else (f"budget={budget:g}",)))
    with sparing_threads():
        found = examine(Path(bundle), attack, settings, selection, model, seed, pick_device(device))
    proofs = found.certificates or (None,) * len(found.texts)
    read = f"read {found.count} {'sentences' if found.images is None else 'images'}, {proofs.count('proven')} proven"
    told = "; nothing recovered is no sign of safety" if not found.count and not found.named else ""
    return Outcome(
        attack=found.title,
        verdict=f"{read}, and named {found.named} words; nobody compared them with the originals{told}",
        notes=(*found.warnings, *found.notes),
        folder=None,
        table=tuple({"recovered": t, "certificate": p} for t, p in zip(found.texts, proofs, strict=True)),
    )
