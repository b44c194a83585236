"""Good inputs of every kind, made once: what the fuzz breaks."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import peft
import pyarrow
import pyarrow.parquet
import torch

import gradaudit
import tiny_models
from gradaudit.audit import run as audit
from gradaudit.audit.fitting import fit_case
from gradaudit.audit.prepare import prepare
from gradaudit.case import parse_case
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.report.render import render

CPU = torch.device("cpu")
ROWS = tiny_models.sentences([4, 3, 5, 4, 3, 5, 4, 3], seed=3, distinct=False)
CASE: dict[str, Any] = {
    "model": "random:bert",
    "seed": 0,
    "data": {"path": "rows.csv", "label": "label", "batch_size": 2, "batches": 2, "skip": 0, "shuffle_seed": 101},
    "client": {"dropout": False, "optimizer": "sgd", "learning_rate": 0.1, "epochs": 1, "freeze": ["0:q"]},
    "knowledge": {"batch_size": True, "lengths": True, "labels": True},
    "selection": {"tensors": "all"},
    "defense": [{"name": "gaussian", "sigma": 0.1}],
    "attack": {"name": "blind"},
    "metrics": {"diagnose": True, "published": []},
}
CLAIMS: dict[str, Any] = {
    "claim": [
        {"name": "noise", "mechanism": "gaussian", "clipped": "example", "clip": 1.0, "noise_std": 1e-3,
         "examples": 200, "rounds": 5, "delta": 1e-5, "declared_epsilon": 10.0, "unit": "client"},
        {"name": "steps", "mechanism": "dp-sgd", "noise_multiplier": 1.0, "batch_size": 64, "examples": 8551,
         "steps": 134, "sampling": "poisson", "declared_epsilon": 3.0, "unit": "example"},
    ]
}  # fmt: skip
SWEEP: dict[str, Any] = {k: v for k, v in CASE.items() if k != "client"} | {
    "data": {"path": "rows.csv", "label": "label"},
    "axes": {"data.batch_size": [1, 2], "client.dropout": [True]},
}
_LTI = {"path": "rows.csv", "rows": 6, "label": "label"}


def make_rows(root: Path) -> None:
    """Write a model and rows into a folder."""
    root.mkdir(exist_ok=True)
    tiny_models.make_folder("bert", root / "bert")
    lines = [f"{text},{n % 2}\n" for n, text in enumerate(ROWS)]
    (root / "rows.csv").write_text("text,label\n" + "".join(lines), encoding="utf8")


def make_corpus(root: Path) -> Path:
    """Write a model, rows, a run, a bundle, one with adapters, and an inverter into a folder and return it."""
    make_rows(root)
    for name in ("bundle", "adapted"):
        model = load_model(ModelSpec(f"random:{root / 'bert'}"))
        module = model.module
        if name == "adapted":
            how = peft.LoraConfig(task_type="SEQ_CLS", r=16, target_modules=["query", "value"])
            module = peft.get_peft_model(module, how).eval()
            for weight, value in module.named_parameters():
                if "lora_B" in weight:  # as after some steps
                    value.data.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
        given = model.tokenizer(ROWS[:2], padding=True, return_tensors="pt")
        given.pop("token_type_ids", None)
        with gradaudit.capture(module, root / name, tokenizer=model.tokenizer):
            module(**given, labels=torch.tensor([0, 1])).loss.backward()
    with chdir(root):
        _run_and_fit(root)
    return root


def _run_and_fit(root: Path) -> None:
    list(audit.run(prepare(parse_case(CASE), root, CPU), root / "run"))
    render(root / "run")
    learned = {k: v for k, v in CASE.items() if k not in ("defense", "client")} | {"public": _LTI}
    learned["attack"] = {"name": "lti", "epochs": 1, "width": 16}
    learned["data"] = CASE["data"] | {"batches": 1}
    fit_case(prepare(parse_case(learned), root, CPU), root / "inverter")
    told = {**learned["attack"], "inverter": "inverter"}
    (root / "lti.toml").write_bytes(toml(learned | {"attack": told}))
    parquet = CASE | {"data": {"path": "rows.parquet", "label": "label"}}
    for name, held in {"again": CASE, "claims": CLAIMS, "sweep": SWEEP, "parquet": parquet}.items():
        (root / f"{name}.toml").write_bytes(toml(held))
    rows = {"text": ROWS, "label": [n % 2 for n in range(len(ROWS))]}
    pyarrow.parquet.write_table(pyarrow.table(rows), root / "rows.parquet")


def as_toml(value: Any) -> str:
    """Return a value as TOML writes it inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return '""' if value is None else json.dumps(value)


def toml(data: Any) -> bytes:
    """Return data as a TOML file."""
    if not isinstance(data, dict):
        return as_toml(data).encode("utf8", errors="replace")
    return "".join(f"{json.dumps(str(k))} = {as_toml(v)}\n" for k, v in data.items()).encode("utf8", errors="replace")
