"""Sweeps: every combination once, each the case that `run` would run; no stop and no failing point loses another."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tiny_models
from gradaudit.audit import run as audit
from gradaudit.audit import text as preparing
from gradaudit.audit.batch import audit_batch
from gradaudit.case import load_case
from gradaudit.cli import app
from gradaudit.data.rows import READERS
from gradaudit.errors import BadInputError
from gradaudit.models.zoo import load_model
from gradaudit.sweeps.result import TABLE
from gradaudit.sweeps.sweep import load_sweep, run_sweep

CPU = torch.device("cpu")
RUN = CliRunner()


@pytest.fixture
def sweep(folders, tmp_path: Path) -> Path:
    """Two sizes by three defenses, on a tiny Llama."""
    return tiny_models.write_sweep(
        tmp_path,
        folders["llama"],
        2,
        '[attack]\nname = "dager"\n'
        "[axes]\ndata.batch_size = [1, 2]\n"
        'defense = [[], [{name = "gaussian", sigma = 10.0}], [{name = "clip"}, {name = "quantize", bits = 4}]]\n',
    )


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / TABLE, encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_combination_is_a_point_the_last_axis_fastest(sweep: Path):
    points = load_sweep(sweep).points
    assert [(p.values["data.batch_size"], p.values["defense"]) for p in points] == [
        (size, defense) for size in ("1", "2") for defense in ("none", "gaussian sigma=10.0", "clip; quantize bits=4")
    ]
    assert [p.case.data.batch_size for p in points] == [1, 1, 1, 2, 2, 2]
    assert [len(p.case.defense) for p in points] == [0, 1, 2, 0, 1, 2]
    assert {p.case.data.batches for p in load_sweep(sweep, ["data.batches=3"]).points} == {3}


def test_words_that_were_named_stand_in_the_table(folders, tmp_path: Path):
    attack = '[attack]\nname = "decode"\n[lora]\nrank = 2\nwarmup = 2\n'
    path = tiny_models.write_sweep(tmp_path, folders["llama"], 2, attack + "[axes]\ndata.batch_size = [1]\n")
    told = RUN.invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    row = table(tmp_path / "out")[0]
    assert (row["words precision"], row["words recall"]) == ("100.0", "100.0")
    assert 0 <= float(row["blind words recall"]) < 100


def test_a_point_is_the_case_that_run_would_run(sweep: Path):
    point = load_sweep(sweep).points[4]
    plain = sweep.read_text().split("[axes]")[0]
    alone = sweep.with_name("case.toml")
    alone.write_text(plain.replace("batches = 2", "batches = 2\nbatch_size = 2") + point_defense())
    assert load_case(alone).content_hash() == point.case.content_hash()


def point_defense() -> str:
    return '[[defense]]\nname = "gaussian"\nsigma = 10.0\n'


def test_two_sweeps_do_not_write_one_folder(sweep: Path, tmp_path: Path):
    """The second would write "another gradaudit is writing" into the table of both, and end with 0."""
    asked, out = load_sweep(sweep), tmp_path / "out"
    first = run_sweep(asked, tmp_path, out, CPU)
    next(first)
    before = (out / TABLE).read_bytes()
    with pytest.raises(BadInputError, match="another gradaudit is writing into"):
        next(run_sweep(asked, tmp_path, out, CPU))
    assert (out / TABLE).read_bytes() == before
    assert RUN.invoke(app, ["sweep", str(sweep), "--out", str(out), "--json"]).exception is not None
    first.close()
    assert next(run_sweep(asked, tmp_path, out, CPU)).error is None


def test_points_are_run_scored_and_written_and_a_second_run_attacks_nothing(sweep: Path, tmp_path: Path, monkeypatch):
    asked, out = load_sweep(sweep), tmp_path / "out"
    results = list(run_sweep(asked, tmp_path, out, CPU))
    exact = [None if r.summary is None else r.summary.scores["exact"].mean for r in results]
    assert exact[0] == exact[3] == 100.0, "no defense: exact"
    assert exact[1] == exact[4] == 0.0, "noise far above the gradient"
    rows = table(out)
    assert [row["defense"] for row in rows] == [p.values["defense"] for p in asked.points]
    assert [float(row["exact mean"]) for row in rows] == exact
    assert not any("defense-not-modeled" in row["flags"] for row in rows), "it was told, and has a counter"
    monkeypatch.setattr(audit, "audit_batch", lambda *_: pytest.fail("attacked again"))
    again = list(run_sweep(asked, tmp_path, out, CPU))
    assert [r.summary for r in again] == [r.summary for r in results]


def test_a_stop_loses_nothing_that_was_finished(sweep: Path, tmp_path: Path, monkeypatch):
    out, real, calls = tmp_path / "out", audit_batch, []

    def stopped(ready, index):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(index)
        return real(ready, index)

    monkeypatch.setattr(audit, "audit_batch", stopped)
    told = RUN.invoke(app, ["sweep", str(sweep), "--out", str(out)])
    assert told.exit_code == 3
    assert "1 of 6 points are kept" in " ".join(told.stderr.split())
    counted: list[int] = []
    monkeypatch.setattr(audit, "audit_batch", lambda ready, index: counted.append(index) or real(ready, index))
    done = RUN.invoke(app, ["sweep", str(sweep), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert len(counted) == 12 - 3
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["values"]["data.batch_size"] for line in lines] == ["1"] * 3 + ["2"] * 3


def test_a_point_that_cannot_be_run_does_not_stop_the_others(sweep: Path, tmp_path: Path):
    text = sweep.read_text().split("defense = ")[0] + 'client.padding = ["right", "left"]\n'
    sweep.write_text(text.replace("llama", "bert"))
    told = RUN.invoke(app, ["sweep", str(sweep), "--out", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    assert "not run" in told.stdout
    assert "padding" in told.stderr
    rows = table(tmp_path / "out")
    assert [bool(row["error"]) for row in rows] == [False, True, False, True]
    assert [row["exact mean"] != "" for row in rows] == [True, False, True, False]
    sweep.write_text(sweep.read_text().replace('["right", "left"]', '["left"]'))
    assert RUN.invoke(app, ["sweep", str(sweep), "--out", str(tmp_path / "none")]).exit_code == 3


def test_data_and_model_are_read_once_for_points_that_share_them(sweep: Path, tmp_path: Path, monkeypatch):
    loads: list[str] = []
    load = load_model
    monkeypatch.setattr(preparing, "load_model", lambda spec, device: loads.append(spec.name) or load(spec, device))
    read: list[str | None] = []
    original = READERS["text"]
    monkeypatch.setitem(READERS._items, "text", lambda spec, base: (read.append(spec.path), original(spec, base))[1])
    points = load_sweep(sweep)
    results = list(run_sweep(points, sweep.parent, tmp_path / "out", CPU))
    assert len(results) == len(points.points) > 1
    assert all(r.summary is not None for r in results)
    assert (len(read), len(loads)) == (1, 1)


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ("", "no [axes]"),
        ("[axes]\nseed = 3", "axis 'seed' needs a list"),
        ("[axes]\nseed = []", "axis 'seed' needs a list"),
        ("[axes]\nseed = [1, 1]", "two points are the same case: seed 1; and seed 1"),
        ('[axes]\n"data.skip" = [1, 2]\ndata.skip = [3]', "given twice"),
        ("seed = 3\n[axes]\nseed = [1, 2]", "'seed' is set and is an axis"),
        ('[attack]\nname = "tag"\n[axes]\nattack = [{name = "blind"}]', "'attack' is set and is an axis"),
        ("name = 2024-01-01\n[axes]\nseed = [1, 2]", "name"),
        ("utility = 3\n[axes]\nseed = [1, 2]", "[utility]: Input should be"),
        ("[axes]\nsed = [1, 2]", "unknown key 'sed'"),
        ("[axes]\nmodel.name = [1]", "'model' is a value, not a table"),
        ('[axes]\nattack = [{name = "dagger"}]', "at attack dagger: unknown attack 'dagger'"),
        ('axes = "all"', "must be a table"),
        ("[axes]\nseed = [%s]\ndata.shuffle_seed = [%s]" % (("1,2,3,4,5,6,7,8,9,0," * 15,) * 2), "at most 10000"),
    ],
)  # fmt: skip
def test_axes_that_make_no_sweep_are_refused_in_a_sentence(tmp_path: Path, axes: str, said: str):
    path = tmp_path / "sweep.toml"
    path.write_text(f'model = "minilm"\n{axes}\n' + ("" if "attack" in axes else '[attack]\nname = "blind"\n'))
    with pytest.raises(BadInputError) as refused:
        load_sweep(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_run_says_that_a_sweep_is_one(sweep: Path):
    with pytest.raises(BadInputError, match="gradaudit sweep"):
        load_case(sweep)


@pytest.mark.parametrize("path", sorted((Path(__file__).resolve().parent.parent / "cases" / "sweeps").glob("*.toml")))
def test_the_sweeps_that_are_given_are_sweeps(path: Path):
    assert len(load_sweep(path).points) > 1


@pytest.mark.parametrize("axis", ["seed = [0, 1]", 'client.precision = ["fp32", "bf16-weights"]'])
def test_points_of_other_weights_have_models_of_their_own(sweep: Path, tmp_path: Path, axis: str):
    sweep.write_text(sweep.read_text().split("[axes]")[0] + f"[axes]\n{axis}\n")
    list(run_sweep(load_sweep(sweep), tmp_path, tmp_path / "out", CPU))
    prints = {json.loads(path.read_text())["model"]["fingerprint"] for path in (tmp_path / "out").glob("*/run.json")}
    assert len(prints) == 2, "other random weights, or the same in bfloat16"


def test_two_processes_find_what_one_finds(sweep: Path, tmp_path: Path):
    alone = list(run_sweep(load_sweep(sweep), tmp_path, tmp_path / "alone", CPU))
    told = RUN.invoke(app, ["sweep", str(sweep), "--out", str(tmp_path / "shared"), "--jobs", "2", "--json"])
    assert told.exit_code == 0, told.output
    assert len(told.stdout.splitlines()) == len(alone)
    seconds = {"seconds"}  # of the machine, not of the case
    one, other = (
        [{k: v for k, v in row.items() if k not in seconds} for row in table(tmp_path / name)]
        for name in ("alone", "shared")
    )
    assert one == other


def test_a_sweep_killed_with_its_processes_goes_on_where_it_stopped(sweep: Path, tmp_path: Path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "gradaudit", "sweep", str(sweep), "--out", str(out), "--jobs", "2", "--json"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert json.loads(first.stdout.readline())["error"] is None  # a point is done
    workers = [int(p) for p in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()]
    first.kill()
    first.wait()
    deadline = time.monotonic() + 300  # whoever started them is gone: they end by themselves, later on a busy machine
    while any(_runs(worker) for worker in workers):
        assert time.monotonic() < deadline, "processes outlive the sweep"
        time.sleep(0.05)
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/records.jsonl")}
    done = {path for path in kept if len(path.read_text().splitlines()) == 2}
    assert done
    again = RUN.invoke(app, [*command[3:-3], "--json"])
    assert again.exit_code == 0, again.output
    assert len(again.stdout.splitlines()) == 6
    assert all(path.stat().st_mtime_ns == kept[path] for path in done)
    assert len(table(out)) == 6


def test_an_interrupt_ends_a_sweep_with_all_its_processes(sweep: Path, tmp_path: Path):
    out, seeds = tmp_path / "out", list(range(40))
    sweep.write_text(sweep.read_text() + f"data.shuffle_seed = {seeds}\n")  # so many that it cannot end before
    command = [sys.executable, "-m", "gradaudit", "sweep", str(sweep), "--out", str(out), "--jobs", "2", "--json"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts with & ignores it, and
    try:  # hands that down: then no interrupt would reach the sweep either
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        first = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    finally:
        signal.signal(signal.SIGINT, before)
    assert first.stdout is not None
    assert json.loads(first.stdout.readline())["error"] is None  # a point is done
    os.killpg(first.pid, signal.SIGINT)  # as a terminal sends it: to all of them
    _, told = first.communicate(timeout=600)
    assert first.returncode == 3
    assert "interrupted" in told
    assert len(list(out.glob("*/records.jsonl"))) < 6 * len(seeds), "it went on"


def _runs(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def test_an_attack_without_a_counter_is_not_run_where_it_was_told_of_the_defense(sweep: Path, tmp_path: Path):
    text = (
        sweep.read_text().split("defense = ")[0]
        + 'defense = [[], [{name = "sign"}]]\nknowledge.defenses = [true, false]\n'
    )
    sweep.write_text(text)
    told = RUN.invoke(app, ["sweep", str(sweep), "--out", str(tmp_path / "out"), "--set", "data.batches=1"])
    assert told.exit_code == 0, told.output
    rows = table(tmp_path / "out")
    signed = [row for row in rows if row["defense"] == "sign"]
    assert all("no counter to 'sign'" in row["error"] for row in signed if row["knowledge.defenses"] == "True")
    unaware = [row for row in signed if row["knowledge.defenses"] == "False"]
    assert all(row["error"] == "" and "defense-not-modeled" in row["flags"] for row in unaware)
    assert len(unaware) == 2
    assert "not supported" in told.stdout
