"""Inputs that ended in a traceback, or in none at all: one sentence and exit code 2 for each."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

import tiny_models
from gradaudit.accounting.claim import load_claims
from gradaudit.bundles import bundle
from gradaudit.bundles.examine import examine
from gradaudit.case import parse_value
from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of
from gradaudit.data.spec import DataSpec
from gradaudit.data.text import load_rows
from gradaudit.errors import BadInputError
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given

DEEP, DIGITS = "[" * 900 + "]" * 900, "9" * 5000
ATTACK = '[attack]\nname = "dager"\n'


@pytest.mark.parametrize("command", ["check", "run", "sweep", "claims"])
@pytest.mark.parametrize(
    "text", [f"a = {DEEP}\n", f"seed = {DIGITS}\n", "a = " + "{b = " * 200 + "1" + "}" * 200 + "\n", "a.b = \xff"]
)
def test_toml_that_breaks_its_reader(gradaudit, tmp_path: Path, command: str, text: str):
    file = tmp_path / "file.toml"
    file.write_bytes(text.encode("latin1") + ATTACK.encode())
    code, _, err = gradaudit(command, file)
    assert code == 2
    assert "nested more than 32 deep" in err or "is not TOML" in err


@pytest.mark.parametrize("value", [DEEP, DIGITS, "[" * 3000, "[" * 40 + "]" * 40, "\udcff\udcfe"])
def test_values_of_the_command_line(gradaudit, tmp_path: Path, value: str):
    with pytest.raises(BadInputError, match="--set"):
        parse_value(value)
    file = tmp_path / "file.toml"
    file.write_text(ATTACK)
    code, _, err = gradaudit("check", file, "--set", f"name={value}")
    assert code == 2
    assert len(err) < 300


def test_files_without_an_end_are_not_read(tmp_path: Path):
    os.mkfifo(tmp_path / "rows.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    signal.alarm(60)  # a mistake here would wait for ever
    for name in ("rows.csv", "zero.csv"):
        with pytest.raises(BadInputError, match="no plain file"):
            load_rows(DataSpec(path=name), tmp_path)
        with pytest.raises(BadInputError, match="no plain file"):
            load_claims(tmp_path / name)
    signal.alarm(0)


def test_times_out_of_range_in_a_parquet_file(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    when = arrow.array([2**62, 1], arrow.timestamp("us"))
    pyarrow.parquet.write_table(arrow.table({"text": ["a", "b"], "when": when}), tmp_path / "a.parquet")
    with pytest.raises(BadInputError, match=r"column 'when' of a\.parquet cannot be read"):
        load_rows(DataSpec(path="a.parquet", label="when"), tmp_path)


def test_a_rank_that_no_memory_holds(gradaudit, folders, tmp_path: Path):
    pytest.importorskip("peft")
    file = tmp_path / "file.toml"
    file.write_text(f'model = "random:{folders["bert"]}"\n[lora]\nrank = 2147483648\n[attack]\nname = "decode"\n')
    code, _, err = gradaudit("check", file)
    assert code == 2
    assert "LoRA of rank 2147483648 is above every width of its matrices; at most 32" in err


def test_more_blocks_than_any_model_has(gradaudit, folders, tmp_path: Path):
    file = tmp_path / "file.toml"
    file.write_text(f'model = "random:{folders["bert"]}"\nlayers = {10**26}\n[attack]\nname = "decode"\n')
    signal.alarm(60)
    code, _, err = gradaudit("check", file)
    signal.alarm(0)
    assert code == 2
    assert "blocks is not made; at most 1000" in err


@pytest.fixture
def made(load, tmp_path: Path) -> Path:
    model = load("bert")
    batch = tiny_models.batch_of(model, tiny_models.sentences([4, 3], seed=1))
    update = Client(model).update(batch, stream(0, "client"))
    folder = tmp_path / "update"
    model.module.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    return bundle.save_bundle(folder, model, update, knowledge_of(batch, update, Given()), inside=True)


def know(folder: Path, **entries: object) -> None:
    manifest = json.loads((folder / bundle.MANIFEST).read_text())
    manifest["knowledge"] |= entries
    (folder / bundle.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"lengths": [10**9, 4]}, "lengths are at most 24"),
        ({"longest": 10**12}, "lengths are at most 24"),
        ({"training": {"optimizer": "sgd", "epochs": 10**9}}, "training takes 1000000000 steps"),
        ({"training": {"optimizer": "sgd", "epochs": 10**6, "minibatch": 1}}, "training takes 2000000 steps"),
    ],
)
def test_absurd_knowledge_is_refused(made: Path, entries: dict, said: str):
    know(made, **entries)
    with pytest.raises(BadInputError, match=said):
        bundle.load_bundle(made).observation(Selection("all"))


def test_a_defense_that_is_named_without_its_fields_has_their_defaults(made: Path):
    know(made, defenses=[{"name": "token-obfuscation"}])
    known = bundle.load_bundle(made).observation(Selection("all")).knowledge
    assert known.defenses == ({"name": "token-obfuscation", "candidates": 8, "alike": 0.25, "share": 1.0},)
    assert examine(made, "decode", (), "all", None, 0, torch.device("cpu")).texts
