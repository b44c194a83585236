"""The net under every rebuilding: what cases are called, what attacks answer, what they refuse.

`python tests/net.py` writes tests/net.json anew: only when a result is meant to move, and the changelog says so.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tiny_models
from gradaudit.audit import run as audit
from gradaudit.audit.info import IMAGES, TEXTS
from gradaudit.audit.prepare import prepare
from gradaudit.case import load_case, parse_case
from gradaudit.errors import AuditError
from gradaudit.registry import known
from gradaudit.sweeps.sweep import load_sweep

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).with_name("net.json")
DIGITS = 4
"""Significant digits that are kept of a number: more would hang on the processor."""

SHORT: dict[str, Any] = {
    "steps": 3, "max_candidates": 500, "tries": 2, "starts": 4, "permutations": 4, "rounds": 1, "every": 2, "edits": 8,
    "passes": 1, "beam_width": 2, "evaluations": 20, "order_evaluations": 10, "proposals": 6, "restarts": 2,
    "latent_steps": 3, "weight_steps": 3, "training_steps": 3, "latent": 8, "epochs": 2, "trial": 4,
    "bottleneck": 32, "width": 32, "hidden": 1, "beam": 2,
}  # fmt: skip
"""Ends of the attacks' longest loops, where an attack has a field of this name."""
FITTED = ("lti", "lti-images")
"""Attacks that learn first."""

COMPOSED = ("auto",)
"""Attacks that run others, which are here, within a time."""

OVER_ROUNDING = ("confidence", "rank_confidence")
"""Ratios to the largest singular value that is rounding alone."""
ROUNDING_DIFFERS = 2.0
"""Two processors' confidences differed by a quarter."""
ROUNDED = (
    "lamp / bert / sgd", "decode / roberta / plain", "decode / bert / adamw",
    *(f"{attack} / bert / adamw" for attack in ("dlg", "tag", "lamp", "grab")),
)  # fmt: skip
"""Cases that two processors (AVX2 and AVX-512) answer differently: searches over steps whose near-ties rounding breaks
(of LAMP, and of the annealing that puts words to sentences), a rank after deflation that rounding raises by one, so
that a sentence is likely and not proven, and what is near a sign: replayed steps of AdamW."""

Setting = dict[str, Any]
CLIENTS: dict[str, Setting] = {
    "plain": {},
    "dropout": {"dropout": True},
    "sgd": {"optimizer": "sgd", "learning_rate": 0.1, "epochs": 2},
    "adamw": {"optimizer": "adamw", "learning_rate": 1e-3, "epochs": 1},
    "two clients": {"clients": 2},
}
FAMILIES = {
    "bert": "classification",
    "roberta": "classification",
    "mpnet": "classification",
    "gpt2": "causal-lm",
    "llama": "causal-lm",
}
BEHIND: dict[str, Setting] = {"error-feedback": {"name": "topk"}}
"""What a defense cannot do without."""


def case_of(attack: str, folder: Path | None, task: str, **tables: Any) -> dict[str, Any]:
    """Return the case of one attack on a tiny model of text, or on LeNet where there is no folder of one."""
    fields = {f.name: f.default for f in dataclasses.fields(known("attack")[attack])}
    short = {
        name: min(value, fields[name])
        for name, value in SHORT.items()
        if isinstance(fields.get(name), int) and not isinstance(fields[name], bool)
    }
    data: dict[str, Any] = {"batch_size": 2, "skip": 3} | tables.pop("data", {})
    if task != "image-classification":
        data |= {"path": str(sentences_in(folder)), "label": "label"} if task == "classification" else {}
        data |= {"path": str(sentences_in(folder))}
        tables["model"] = f"random:{folder}"
        if attack in FITTED:
            tables["public"] = {"path": str(sentences_in(folder)), "rows": 8, "label": "label"}
            if task != "classification":
                del tables["public"]["label"]
    else:
        tables["model"] = "lenet"
        if attack in FITTED:
            tables["public"] = {"source": "digits", "rows": 40}
    return {"task": task, "data": data, "attack": {"name": attack, **short}, **tables}


def sentences_in(folder: Path | None) -> Path:
    """Return a file of thirty sentences of the tiny models' words, written on first use."""
    assert folder is not None
    file = folder / "sentences.jsonl"
    if not file.exists():
        texts = tiny_models.sentences([3 + n % 4 for n in range(30)], 1, distinct=False)
        file.write_text("".join(json.dumps({"text": t, "label": n % 2}) + "\n" for n, t in enumerate(texts)))
    return file


def outcome(case: dict[str, Any], folder: Path, whole: bool) -> Any:
    """Return what came of a case's first batch: its record and the private side, or the refusal.

    Args:
        case: as parsed TOML.
        folder: for what it learns and writes.
        whole: all of it; otherwise whether it ran, and its flags.
    """
    with tempfile.TemporaryDirectory(dir=folder) as out:
        try:
            ready = prepare(parse_case(case), folder, torch.device("cpu"))
            (record,) = audit.run(ready, Path(out), inverters=Path(out) / "inverters")
        except AuditError as refusal:
            return f"refused: {shortened(str(refusal))}"
        if not whole:
            # whether one batch of a tiny model beats the blind goes with rounding: the records hold scores
            return {"error": record.error, "flags": [flag for flag in record.flags if flag != "blind-not-beaten"]}
        data = record.model_dump(mode="json")
        files = [Path(out) / name for name in (TEXTS, IMAGES) if (Path(out) / name).exists()]
        private = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        for one in (data, *private):
            for name in ("case", "setting", "seconds", "originals"):
                one.pop(name, None)
            for name in ("words", "baseline_words"):  # of attacks that name words
                if one.get(name) is None:
                    one.pop(name, None)
        for one in private:  # what comes of pixels by rounding is in the scores
            one["recovered"] = [text and (text if "original_words" in one else "image") for text in one["recovered"]]
        return shortened({"record": data, "private": private})


def shortened(value: Any) -> Any:
    """Return plain data with numbers cut to so many digits and no folder of this machine."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, str):
        value = re.sub(r"(of which it was told; ).*(, or set defenses)", r"\1choose another attack, or defenses", value)
        return re.sub(r"[^\s('\"]*/(\w+/sentences\.jsonl)", r"FOLDER/\1", value)
    if isinstance(value, dict):
        return {name: shortened(one) for name, one in value.items() if name not in ("seconds", "minutes")}
    if isinstance(value, list):
        return [shortened(one) for one in value]
    return value


def attacks() -> dict[str, Any]:
    """Return every attack that has an answer of its own."""
    return {name: cls for name, cls in known("attack").items() if name not in COMPOSED}


def cases() -> dict[str, Any]:
    """Return the ids of every case and of every cell of every sweep in cases/."""
    found: dict[str, Any] = {}
    for file in sorted((ROOT / "cases").glob("*.toml")):
        found[file.name] = load_case(file).content_hash()
    for file in sorted((ROOT / "cases" / "sweeps").glob("*.toml")):
        found[f"sweeps/{file.name}"] = [point.case.content_hash() for point in load_sweep(file).points]
    return found


def records(folders: dict[str, Path]) -> Iterator[tuple[str, Any]]:
    """Yield a case of every attack on tiny models, by name."""
    for name, cls in attacks().items():
        for family, task in FAMILIES.items():
            if task not in cls.tasks and "image-classification" in cls.tasks and name != "blind":
                continue
            for how, client in CLIENTS.items():
                if how != "plain" and (family != "bert" or name in FITTED):
                    continue
                case = case_of(name, folders[family], task, client=client, knowledge={"lengths": True, "labels": True})
                yield f"{name} / {family} / {how}", case
        if "image-classification" in cls.tasks:
            for how, client in CLIENTS.items():
                if how != "plain" and name in FITTED:
                    continue
                case = case_of(name, None, "image-classification", client=client, knowledge={"labels": True})
                yield f"{name} / lenet / {how}", case


def support(folders: dict[str, Path]) -> Iterator[tuple[str, Any]]:
    """Yield a case of every attack under every defense, told of it and not."""
    for name, cls in attacks().items():
        for defense in known("defense"):
            defenses = [{"name": defense}, *([BEHIND[defense]] if defense in BEHIND else [])]
            for told in (True, False):
                # what a defense does to the sum of several clients is the same for all attacks
                for clients in (1, 2) if told and name == "decode" else (1,):
                    if name in FITTED and not told:
                        continue
                    tables = {
                        "defense": defenses,
                        "client": {"clients": clients},
                        "knowledge": {"defenses": told, "lengths": True, "labels": True},
                    }
                    images = "image-classification" in cls.tasks and name != "blind"
                    if images:
                        case = case_of(name, None, "image-classification", **tables)
                    else:
                        case = case_of(name, folders["bert"], "classification", **tables)
                    how = f"{name} / {defense} / {'told' if told else 'not told'} / {clients}"
                    yield how, case


def same(stored: Any, made: Any) -> bool:
    """Say whether two of the net's entries agree; numbers to a thousandth of themselves, confidences to a factor."""
    if isinstance(stored, float | int) and isinstance(made, float | int):
        return math.isclose(stored, made, rel_tol=2e-3, abs_tol=1e-6)
    if isinstance(stored, dict) and isinstance(made, dict):
        return stored.keys() == made.keys() and all(
            alike(stored[name], made[name]) if name in OVER_ROUNDING else same(stored[name], made[name])
            for name in stored
        )
    if isinstance(stored, list) and isinstance(made, list):
        return len(stored) == len(made) and all(same(one, other) for one, other in zip(stored, made, strict=True))
    return bool(stored == made)


def alike(stored: float, made: float) -> bool:
    """Say whether two ratios to a floor of rounding agree, which is another one on every processor."""
    return 1 / ROUNDING_DIFFERS < made / stored < ROUNDING_DIFFERS


def rough(entry: Any) -> Any:
    """Return what of an entry does not hang on the processor where its answer does."""
    return {name: entry["record"][name] for name in ("error", "flags", "tokens", "batch_size", "knowledge")}


def main() -> None:
    """Write the net."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        folders = {family: tiny_models.make_folder(family, folder / family) for family in tiny_models.FAMILIES}
        net = {
            "cases": cases(),
            "records": {key: outcome(case, folder, True) for key, case in records(folders)},
            "support": {key: outcome(case, folder, False) for key, case in support(folders)},
        }
    STORED.write_text(json.dumps(net, indent=0, sort_keys=True) + "\n", encoding="utf8")
    print({name: len(part) for name, part in net.items()})


if __name__ == "__main__":
    main()
