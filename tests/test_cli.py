"""The command line: what each command prints, and each kind of bad input: one sentence, its exit code, no traceback."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import tiny_models
from gradaudit import cli
from gradaudit.audit import run as audit
from gradaudit.audit.batch import audit_batch
from gradaudit.bundles import bundle
from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of
from gradaudit.errors import BadInputError
from gradaudit.progress import step
from gradaudit.report import terminal
from gradaudit.streams import stream
from gradaudit.types import Given

SCORES = {"rouge1", "rouge2", "rougeL", "token_accuracy", "exact"}


@pytest.fixture
def case(folders, tmp_path: Path) -> Path:
    rows = tmp_path / "rows.csv"
    texts = tiny_models.sentences([4, 3, 5, 4], seed=3)
    rows.write_text("text,label\n" + "".join(f"{t},{i % 2}\n" for i, t in enumerate(texts)), encoding="utf8")
    path = tmp_path / "case.toml"
    path.write_text(
        f'model = "random:{folders["llama"]}"\n[data]\npath = "rows.csv"\nlabel = "label"\n'
        'batch_size = 2\nbatches = 2\n[attack]\nname = "dager"\n',
        encoding="utf8",
    )
    return path


@pytest.mark.parametrize("how", ["returned", "raised", "pipe"])
def test_what_is_cut_short_says_nothing_of_leaks(gradaudit, monkeypatch, how):
    """Typer gives 130 after Ctrl-C, and 1, which is a crossed threshold here, where nobody reads the output."""

    def ended(standalone_mode: bool) -> int:
        if how == "raised":
            raise KeyboardInterrupt
        if how == "pipe":
            sys.exit(1)
        return 130

    monkeypatch.setattr(cli, "app", ended)
    code, _, err = gradaudit("run", "case.toml")
    assert code == 3
    assert ("interrupted" in err) == (how != "pipe")


def test_names_out_of_files_do_not_drive_the_terminal(gradaudit, monkeypatch):
    def broken(standalone_mode: bool) -> int:
        raise BadInputError("column '\x1b]52;c;ZXZpbA==\x07[bold]' is missing")

    monkeypatch.setattr(cli, "app", broken)
    code, _, err = gradaudit("run", "case.toml")
    assert code == 2
    assert "\x1b]" not in err
    assert "[bold]" in err


def test_without_out_each_case_has_a_folder_of_its_own(gradaudit, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for setting in ("data.batches=1", "data.batches=2"):
        code, out, _ = gradaudit("run", case, "--set", setting)
        assert code == 0
        assert "out/case-" in out
    folders = sorted((tmp_path / "out").iterdir())
    assert [len((f / "records.jsonl").read_text(encoding="utf8").splitlines()) for f in folders] in ([1, 2], [2, 1])


@pytest.fixture(scope="module")
def update(load, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = load("llama")
    client = Client(model)
    batch = tiny_models.batch_of(model, tiny_models.sentences([4, 3], seed=1))
    sent = client.update(batch, stream(0, "client"))
    folder = tmp_path_factory.mktemp("made") / "update"
    model.module.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    return bundle.save_bundle(folder, model, sent, knowledge_of(batch, sent, Given()), inside=True)


def test_run_prints_a_json_object_a_batch_and_nothing_else(gradaudit, case: Path, tmp_path: Path):
    code, out, _ = gradaudit("run", case, "--out", tmp_path / "out", "--json")
    assert code == 0
    *rows, last = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert {"attack", "scores", "baseline", "load", "seconds", "flags", "error"} <= set(row)
        assert set(row["scores"]) == set(row["baseline"]) == SCORES
        assert all(value is None or 0 <= value <= 100 for value in row["scores"].values())
        assert row["error"] is None
    assert last["summary"] is True
    assert last["n"] == 2
    assert set(last["scores"]) == set(last["intervals"]) == SCORES
    assert last["scores"]["exact"] == sum(r["scores"]["exact"] for r in rows) / 2
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "records.jsonl",
        "texts.jsonl",
        "run.json",
        "report.html",
        ".lock",
    }


@pytest.mark.parametrize("asked", [False, True])
def test_compile_reaches_the_attack(gradaudit, case: Path, update: Path, tmp_path: Path, monkeypatch, asked: bool):
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    flag = ["--compile"] if asked else []
    how = [
        "--set",
        "attack.name=tag",
        "--set",
        "attack.steps=2",
        "--set",
        "data.batches=1",
        "--set",
        "task=classification",
        "--set",
        'selection.tensors="0:q"',  # little to trace
    ]
    code, out, _ = gradaudit("run", case, "--out", tmp_path / "out", "--json", *how, *flag)
    assert code == 0
    assert ("compiled" in json.loads(out.splitlines()[0])["details"]) == asked
    how = ["--attack", "tag", "--set", "steps=2", "--selection", "0:q"]
    code, out, _ = gradaudit("attack", update, "--json", *how, *flag)
    assert code == 0
    assert ("compiled" in json.loads(out.splitlines()[0])["details"]) == asked


def test_run_prints_a_table_and_a_verdict(gradaudit, case: Path, tmp_path: Path):
    code, out, _ = gradaudit("run", case, "--out", tmp_path / "out")
    assert code == 0
    assert "Verdict:" in out
    assert "dager" in out
    assert "random weights" in out


def test_the_report_is_redacted_unless_asked_for(gradaudit, case: Path, tmp_path: Path):
    words = tiny_models.sentences([4, 3, 5, 4], seed=3)[0].split()
    gradaudit("run", case, "--out", tmp_path / "out", "--json")
    report = tmp_path / "out" / "report.html"
    assert not [w for w in words if f">{w}<" in report.read_text()]
    assert gradaudit("report", tmp_path / "out", "--show-text")[0] == 0
    assert [w for w in words if w in report.read_text()] == words
    assert gradaudit("report", tmp_path / "out")[0] == 0
    assert not [w for w in words if f">{w}<" in report.read_text()]


@pytest.mark.parametrize(("limit", "code"), [("exact>0", 1), ("rougeL>=100", 1), ("exact<0", 0), ("rouge1<50", 0)])
def test_fail_on(gradaudit, case: Path, tmp_path: Path, limit: str, code: int):
    found, _, err = gradaudit("run", case, "--out", tmp_path / "out", "--json", "--fail-on", limit)
    assert found == code
    assert ("threshold crossed" in err) is bool(code)


def test_a_threshold_that_no_batch_can_cross_says_so(gradaudit, folders, tmp_path: Path):
    """Single words have no ROUGE-2: to end with 0 would call a total leak harmless."""
    (tmp_path / "rows.csv").write_text("text,label\nriver,0\n", encoding="utf8")
    case = tmp_path / "case.toml"
    case.write_text(f'model = "random:{folders["bert"]}"\n[data]\npath = "rows.csv"\nlabel = "label"\n'
                    '[attack]\nname = "dager"\n')  # fmt: skip
    code, _, err = gradaudit("run", case, "--out", tmp_path / "o", "--json", "--fail-on", "rouge2>=20")
    assert code == 3
    assert "rouge2>=20 cannot be judged" in err
    assert gradaudit("run", case, "--out", tmp_path / "o", "--json", "--fail-on", "rouge1>=20")[0] == 1


def test_every_batch_failing_is_inconclusive(gradaudit, case: Path, tmp_path: Path):
    code, out, err = gradaudit("run", case, "--out", tmp_path / "o", "--json", "--set", 'selection.tensors="0:f"')
    assert code == 3
    rows = [json.loads(line) for line in out.splitlines()]
    assert all("dager" in row["error"] for row in rows[:-1])
    assert rows[-1]["scores"]["rougeL"] == 0.0
    assert "no sign of safety" in err


def test_ctrl_c_keeps_what_is_finished_and_the_same_command_goes_on(gradaudit, case, tmp_path, monkeypatch):
    real = audit_batch

    def interrupted(ready, index: int):
        if index == 1:
            raise KeyboardInterrupt
        return real(ready, index)

    monkeypatch.setattr(audit, "audit_batch", interrupted)
    code, out, err = gradaudit("run", case, "--out", tmp_path / "out", "--json")
    assert code == 3
    assert "1 of 2 batches are kept" in err
    monkeypatch.setattr(audit, "audit_batch", real)
    code, again, _ = gradaudit("run", case, "--out", tmp_path / "out", "--json")
    assert code == 0
    assert again.splitlines()[0] == out.splitlines()[0]
    assert len(again.splitlines()) == 3


def test_attack_needs_no_truth(gradaudit, update: Path):
    code, out, _ = gradaudit("attack", update, "--attack", "dager", "--json")
    assert code == 0
    found = json.loads(out)
    assert sorted(found["texts"]) == sorted(tiny_models.sentences([4, 3], seed=1))
    assert found["flags"] == ["no-truth"]
    code, out, _ = gradaudit("attack", update)
    assert code == 0
    assert all(text in out for text in found["texts"])


def test_attack_fields_can_be_set(gradaudit, update: Path):
    code, out, _ = gradaudit("attack", update, "--attack", "tag", "--set", "steps=2", "--json")
    assert code == 0
    assert json.loads(out)["details"]["gradient_evaluations"] == 3


@pytest.mark.parametrize("kind", ["attacks", "models", "metrics", "defenses", "data"])
def test_list(gradaudit, kind: str):
    code, out, _ = gradaudit("list", kind, "--json")
    items = json.loads(out)
    assert code == 0
    assert items
    assert all(item["name"] and item["about"] for item in items)
    code, plain, _ = gradaudit("list", kind)
    assert all(item["name"] in plain for item in items)


def test_show_names_fields_defaults_sources_and_needs(gradaudit):
    code, out, _ = gradaudit("show", "attack", "tag", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["needs"] == ["batch_size"]
    steps = next(f for f in found["fields"] if f["name"] == "steps")
    assert steps["default"] == 2500
    assert steps["source"]
    assert "2500" in gradaudit("show", "attack", "tag")[1]
    assert "[attack]" in gradaudit("show", "case", "example")[1]


def test_check_prints_the_resolved_case_and_an_estimate(gradaudit, case: Path):
    code, out, _ = gradaudit("check", case, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["case"]["attack"]["max_candidates"] == 10_000_000
    assert found["estimate"]["seconds"] > 0
    assert found["estimate"]["memory_mib"] > 0
    assert "estimate:" in gradaudit("check", case)[1]
    assert found["estimate"]["learning"] == 0


BAD_RUNS = [
    (["run", "none.toml", "--out", "o"], "no such case file"),
    (["run", "CASE", "--out", "o", "--set", "attack.name=dagr"], "did you mean 'dager'?"),
    (["run", "CASE", "--out", "o", "--set", "model=minilmm"], "did you mean 'minilm'?"),
    (["run", "CASE", "--out", "o", "--set", "model=./nowhere"], "is not a folder"),
    (["run", "CASE", "--out", "o", "--set", "attack.rnk=3"], "did you mean 'rank'?"),
    (["run", "CASE", "--out", "o", "--set", "data.path=none.csv"], "none.csv"),
    (["run", "CASE", "--out", "o", "--set", "data.path=empty.csv"], "empty"),
    (["run", "CASE", "--out", "o", "--set", "data.text=txt"], "text"),
    (["run", "CASE", "--out", "o", "--set", "data.batch_size=50"], "50"),
    (["run", "CASE", "--out", "o", "--set", "selection.tensors=9:q"], "layer 9"),
    (["run", "CASE", "--out", "o", "--set", "client.freeze=['everything']"], "everything"),
    (["run", "CASE", "--out", "o", "--device", "tpu"], "unknown device 'tpu'"),
    (["run", "CASE", "--out", "o", "--fail-on", "rougL>3"], "did you mean 'rougeL'?"),
    (["run", "CASE", "--out", "o", "--fail-on", "much"], "SCORE>VALUE"),
    (["run", "CASE", "--out", "o", "--fail-on", "mse<0.01"], "a run of text has no score 'mse'"),
    (["run", "CASE", "--out", "CASE"], "cannot make folder"),
    (["fit", "CASE"], "--out"),
    (["attack", "nowhere"], "no such bundle"),
    (["attack", "UPDATE", "--attack", "dagger"], "did you mean 'dager'?"),
    (["attack", "UPDATE", "--attack", "tag", "--set", "step=3"], "did you mean 'steps'?"),
    (["attack", "UPDATE", "--model", "random:gpt-2"], "random:gpt2"),
    (["attack", "UPDATE", "--selection", "0:z"], "names role 'z'"),
    (["report", "nowhere"], "gradaudit run"),
    (["list", "attakcs"], "did you mean 'attacks'?"),
    (["show", "attack", "tga"], "did you mean 'tag'?"),
    (["show", "atack", "tag"], "did you mean 'attack'?"),
    (["check", "none.toml"], "no such case file"),
    (["chek"], "No such command"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD_RUNS, ids=[" ".join(a) for a, _ in BAD_RUNS])
def test_bad_input_is_one_sentence_and_exit_code_2(gradaudit, case, update, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.csv").write_text("")
    places = {"CASE": case, "UPDATE": update}
    code, out, err = gradaudit(*(places.get(a, a) for a in arguments))
    assert code == 2
    assert said in " ".join(err.split())
    assert out == ""


def test_recovered_text_cannot_drive_the_terminal():
    from gradaudit.report.terminal import harmless

    evil = "\x1b[2Jgone\u202eevil\x07\nline"
    shown = harmless(evil)
    assert "gone" in shown
    assert not any(c in shown for c in "\x1b\u202e\x07\n")


def test_the_program_starts_as_a_process():
    done = subprocess.run([sys.executable, "-m", "gradaudit", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("gradaudit ")


@pytest.mark.parametrize(("command", "said"), [("sweep", "[axes]"), ("fit", "[public]")])
def test_help_shows_tables_in_brackets(gradaudit, command, said):
    code, out, _ = gradaudit(command, "-h")
    assert (code, said in out) == (0, True), out


def test_bars_say_how_long_it_still_takes():
    told = io.StringIO()
    with terminal.progress_bars(Console(file=told, force_terminal=True, width=120)):
        for done in range(4):
            step("batches", done, 100)
    assert "left:" in told.getvalue()


def test_where_nobody_sees_bars_progress_is_a_line_now_and_then(monkeypatch):
    told = io.StringIO()
    monkeypatch.setattr(terminal, "_LINE_EVERY", 0.0)
    with terminal.progress_bars(Console(file=told)):
        step("batches", 1, 3)
    assert told.getvalue() == "batches: 1 of 3\n"
    monkeypatch.setattr(terminal, "_LINE_EVERY", 30.0)
    with terminal.progress_bars(Console(file=told)):
        step("batches", 2, 3)
    assert told.getvalue() == "batches: 1 of 3\n"
