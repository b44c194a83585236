"""A kind of data that nobody foresaw is audited, judged and reported by its own six files; no generic one knows it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gradaudit
from gradaudit import registry
from gradaudit.audit.loading import LOADERS
from gradaudit.audit.prepare import prepare
from gradaudit.audit.run import run
from gradaudit.case import parse_case
from gradaudit.client.examples import EXAMPLES
from gradaudit.data.rows import BINDERS, MARKS, READERS
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.priors import GUESSES
from gradaudit.metrics.summary import summarize
from gradaudit.models.spec import TASKS
from gradaudit.report.render import render
from gradaudit.scores import SCORES
from gradaudit.verdict.level import RULES
from gradaudit.verdict.run import verdicts

HERE = Path(__file__).parent / "table_kind"
OWN = ("attack", "audit", "data", "judging", "model", "training")


@pytest.fixture
def table(monkeypatch, tmp_path: Path) -> Iterator[Path]:
    """The kind, known inside the test alone, and a file of it."""
    registry.known("attack")
    registry.known("defense")
    monkeypatch.setattr(registry, "_entries", {kind: dict(table) for kind, table in registry._entries.items()})
    for name in OWN:
        __import__(f"table_kind.{name}")
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(12, 5, generator=rng)
    lines = ["a,b,c,d,e,label", *(",".join([*(f"{x:.4f}" for x in row), str(n % 3)]) for n, row in enumerate(values))]
    file = tmp_path / "table.csv"
    file.write_text("\n".join(lines))
    yield file
    for registered in (LOADERS, EXAMPLES, BINDERS, MARKS, READERS, GUESSES, SCORES, RULES):
        registered.remove("table")
    TASKS.pop("table-classification", None)
    for name in [module for module in sys.modules if module.startswith("table_kind")]:
        del sys.modules[name]


def case_of(file: Path, **tables):
    data = {"path": str(file), "batches": 3}
    return parse_case({"task": "table-classification", "model": "linear", "data": data} | tables)


def test_it_takes_six_files_and_no_edit_of_a_generic_one():
    assert sorted(path.stem for path in HERE.glob("*.py")) == ["__init__", *OWN]
    for path in Path(gradaudit.__file__).parent.rglob("*.py"):
        assert "table_kind" not in path.read_text(encoding="utf8")


def test_its_rows_are_read_judged_and_reported(table: Path, tmp_path: Path):
    ready = prepare(case_of(table, attack={"name": "read-row"}), tmp_path, torch.device("cpu"))
    records = list(run(ready, tmp_path / "out"))
    assert [record.error for record in records] == [None] * 3
    for record in records:
        told, blind = record.scores["rmse"], record.baseline["rmse"]
        assert told is not None
        assert blind is not None
        assert told < 1e-4 < 0.1 < blind
    assert all(record.diagnosis is not None and record.diagnosis.verdict == "solved" for record in records)
    assert all("blind-not-beaten" not in record.flags for record in records)
    lines = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    assert len(json.loads(lines[0])["recovered"][0]) == 5
    found = verdicts(summarize(records), records)
    assert found.overall.level == "leaks"
    assert "RMSE" in render(tmp_path / "out").read_text()


def test_a_row_of_another_update_is_not_read(table: Path, tmp_path: Path):
    """Swap control: what is read is the update's own row."""
    ready = prepare(case_of(table, attack={"name": "read-row"}), tmp_path, torch.device("cpu"))
    from gradaudit.audit.batch import sent
    from gradaudit.audit.prepare import private_batch

    _, seen = sent(ready, private_batch(ready, 0), 0)
    found = ready.attack(seen, torch.Generator())
    assert ready.judge.judge(private_batch(ready, 1), found).scores["rmse"] > 0.1


def test_defenses_and_local_steps_act_on_it_too(table: Path, tmp_path: Path):
    noise = {"defense": [{"name": "gaussian", "sigma": 0.1}], "knowledge": {"defenses": False}}
    for more in (noise, {"client": {"optimizer": "sgd", "learning_rate": 0.1, "epochs": 3}}):
        ready = prepare(case_of(table, attack={"name": "read-row"}, **more), tmp_path, torch.device("cpu"))
        (record, *_) = run(ready, tmp_path / str(len(more)))
        assert {"defense-not-modeled", "delta-as-gradient"} & set(record.flags)
    told = case_of(table, attack={"name": "read-row"}, defense=[{"name": "sign"}])
    with pytest.raises(NotSupportedError, match="'read-row' has no counter to 'sign'"):
        prepare(told, tmp_path, torch.device("cpu"))


def test_without_its_files_the_task_is_unknown(tmp_path: Path):
    with pytest.raises(Exception, match="Input should be 'classification'"):
        parse_case({"task": "table-classification", "attack": {"name": "blind"}})
