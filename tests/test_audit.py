"""Case -> Record on tiny models: provenance, failures as records, resume, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import tiny_models
from gradaudit import registry
from gradaudit.attacks.base import Attack
from gradaudit.audit import run as audit
from gradaudit.audit.batch import audit_batch
from gradaudit.audit.info import INFO, RECORDS
from gradaudit.audit.prepare import Prepared, pick_device, prepare
from gradaudit.case import parse_case
from gradaudit.errors import BadInputError, MissingKnowledgeError, NotSupportedError
from gradaudit.files import read_lines
from gradaudit.record import Record, RunInfo, Texts
from gradaudit.types import Observation, Reconstruction

CPU = torch.device("cpu")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = tiny_models.sentences([4, 3, 5, 4, 3, 5], seed=3, distinct=False)
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"{t},{i % 2}\n" for i, t in enumerate(rows)), encoding="utf8")
    return path


def make(folders, rows: Path, family: str = "llama", **over) -> Prepared:
    case = {
        "model": f"random:{folders[family]}",
        "data": {"path": str(rows), "label": "label", "batch_size": 2, "batches": 3},
        "attack": {"name": "dager"},
    }
    for key, value in over.items():
        case[key] = case.get(key, {}) | value if isinstance(value, dict) else value
    return prepare(parse_case(case), Path.cwd(), CPU)


@pytest.mark.parametrize(
    ("over", "same"),
    [
        ({"attack": {"name": "tag"}}, True),
        ({"client": {"precision": "bf16-weights"}}, False),
        ({"seed": 1}, False),
        ({"lora": {"rank": 2, "warmup": 1}}, False),
    ],
    ids=str,
)
def test_a_loaded_model_serves_the_cases_that_name_it(folders, data, over, same):
    """Adapters are always made anew: they are warmed up on rows beside the batches."""
    for first in ({}, {"lora": over["lora"]}) if "lora" in over else ({},):
        loaded = make(folders, data, **{"data": {"batches": 1}} | first)
        again = prepare(loaded.case.model_validate(loaded.case.model_dump() | over), Path.cwd(), CPU, loaded.model)
        assert (again.model is loaded.model) == same


def test_a_record_says_how_it_came_about(folders, data: Path, tmp_path: Path):
    ready = make(folders, data, metrics={"published": ["max-with-replacement"]})
    records = list(audit.run(ready, tmp_path / "out"))
    assert [r.batch for r in records] == [0, 1, 2]
    first = records[0]
    assert first.error is None
    assert first.scores["exact"] == 100.0  # tiny, dropout off, below the width: theory says exact
    assert first.load == pytest.approx(first.tokens / tiny_models.WIDTH)
    assert first.knowledge["batch_size"] == 2
    assert "lengths" not in first.knowledge
    assert "labels" not in first.knowledge
    assert first.spectrum is not None
    assert first.spectrum.rank <= first.tokens
    assert first.diagnosis is not None
    assert first.diagnosis.verdict == "solved"
    assert first.diagnosis.truth == pytest.approx(0.0, abs=1e-5)
    assert first.share_of_parameters == 1.0
    assert "random-weights" in first.flags
    assert set(first.published) == {"max-with-replacement", "max-with-replacement (blind)"}
    info = json.loads((tmp_path / "out" / "run.json").read_text())
    assert info["model"]["random_weights"]
    assert info["case"] == first.case
    assert len(info["data"]["sha256"]) == 64


def test_records_hold_no_text_and_texts_are_private(folders, data: Path, tmp_path: Path):
    out = tmp_path / "out"
    list(audit.run(make(folders, data), out))
    records = (out / "records.jsonl").read_text()
    texts = list(read_lines(out / "texts.jsonl", Texts))
    words = {w for t in texts for s in t.original_words for w in s if len(w) > 3}
    assert words
    assert not [w for w in words if w in records]
    assert (out / "texts.jsonl").stat().st_mode & 0o077 == 0


def test_running_again_goes_on_and_repeats_nothing(folders, data: Path, tmp_path: Path):
    out, ready = tmp_path / "out", make(folders, data)
    some = audit.run(ready, out)
    next(some)
    some.close()
    kept = (out / "records.jsonl").read_bytes()
    with open(out / "records.jsonl", "ab") as file:
        file.write(b'{"case": "cut sho')  # as a kill in the middle of a write leaves it
    records = list(audit.run(ready, out))
    assert len(records) == 3
    assert (out / "records.jsonl").read_bytes().startswith(kept)
    assert len(list(read_lines(out / "records.jsonl", Record))) == 3
    whole = list(audit.run(ready, tmp_path / "again"))
    for a, b in zip(records, whole, strict=True):
        assert a.model_dump(exclude={"seconds"}) == b.model_dump(exclude={"seconds"})


def test_a_folder_of_another_case_is_refused(folders, data: Path, tmp_path: Path):
    list(audit.run(make(folders, data), tmp_path / "out"))
    with pytest.raises(BadInputError, match="another case"):
        list(audit.run(make(folders, data, seed=1), tmp_path / "out"))


def test_a_trained_head_keeps_its_numbers_of_the_classes(folders, load, tmp_path: Path):
    own = tmp_path / "own"
    model = load("bert", labels=3)
    model.module.save_pretrained(own)
    for file in Path(folders["bert"]).glob("*token*"):
        shutil.copy(file, own)
    texts = tiny_models.sentences((3, 4, 3, 4), 5)
    for names, right in ((("0", "2"), (0, 2)), (("LABEL_2", "LABEL_1"), (2, 1))):
        rows = tmp_path / "rows.csv"
        rows.write_text("text,label\n" + "".join(f"{t},{names[n % 2]}\n" for n, t in enumerate(texts)))
        table = {"model": str(own), "data": {"path": str(rows), "label": "label"}, "attack": {"name": "blind"}}
        ready = prepare(parse_case(table), tmp_path, torch.device("cpu"))
        assert ready.model.spec.labels == 3
        assert [ready.rows.source.labels[n] for n in range(2)] == list(right)
    rows.write_text("text,label\n" + "".join(f"{t},{'wxyz'[n]}\n" for n, t in enumerate(texts)))
    with pytest.raises(BadInputError, match="could not be loaded"):
        prepare(parse_case(table), tmp_path, torch.device("cpu"))


def test_a_language_model_that_is_not_there_ends_the_run_before_its_first_batch(folders, data: Path):
    with pytest.raises(BadInputError, match="unknown model 'smollm3'"):
        make(folders, data, attack={"name": "lamp", "prior": "smollm3"})


def test_two_programs_do_not_write_one_folder(folders, data: Path, tmp_path: Path):
    first = audit.run(make(folders, data), tmp_path / "out")
    next(first)
    with pytest.raises(BadInputError, match="another gradaudit is writing"):
        next(audit.run(make(folders, data), tmp_path / "out"))
    first.close()
    assert [r.batch for r in audit.run(make(folders, data), tmp_path / "out")] == [0, 1, 2]


def test_changed_weights_are_not_mixed_into_a_run(folders, data: Path, tmp_path: Path):
    ready = make(folders, data)
    some = audit.run(ready, tmp_path / "out")
    next(some)
    some.close()
    with torch.no_grad():
        next(iter(ready.model.parameters().values())).add_(1e-3)
    ready.model.weights_changed()
    with pytest.raises(BadInputError, match="model's weights have changed"):
        next(audit.run(ready, tmp_path / "out"))
    (tmp_path / "out" / RECORDS).unlink()
    half = tmp_path / "out" / audit.UNFINISHED / f"{ready.case.content_hash()[:16]}-1.safetensors"
    half.parent.mkdir(exist_ok=True)
    half.write_bytes(b"of the old weights")
    next(audit.run(ready, tmp_path / "out"))
    assert not half.exists(), "what was kept of an attack on other weights is of no use"
    told = json.loads((tmp_path / "out" / INFO).read_text())
    assert told["model"]["fingerprint"] == ready.model.fingerprint()


def test_changed_data_is_not_mixed_into_a_run(folders, data: Path, tmp_path: Path):
    some = audit.run(make(folders, data), tmp_path / "out")
    next(some)
    some.close()
    data.write_text(data.read_text().replace("0\n", "1\n", 1), encoding="utf8")
    with pytest.raises(BadInputError, match="data has changed"):
        list(audit.run(make(folders, data), tmp_path / "out"))


def test_an_attack_that_breaks_is_a_record_and_the_others_go_on(folders, data: Path, tmp_path: Path, monkeypatch):
    @dataclass(frozen=True)
    class Brittle(Attack):
        """Break on the second batch."""

        name: ClassVar[str] = "brittle"
        source: ClassVar[str] = "test"
        textless: ClassVar[bool] = True

        def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
            if len(list(read_lines(tmp_path / "out" / "records.jsonl", Record))) == 1:
                raise ValueError("something broke\nwith a second line")
            return Reconstruction(sequences=())

    monkeypatch.setitem(registry._entries["attack"], "brittle", Brittle)
    records = list(audit.run(make(folders, data, attack={"name": "brittle"}), tmp_path / "out"))
    assert [r.error for r in records] == [None, "ValueError: something broke", None]
    assert records[1].scores["rougeL"] == 0.0
    assert records[1].baseline["rougeL"] is not None
    from gradaudit.metrics.summary import summarize

    summary = summarize(records)[0]
    assert (summary.n, summary.failed) == (3, 1)
    assert summary.scores["rougeL"].n == 3  # the failure is in the mean, as 0


@pytest.mark.parametrize(("replayed", "flagged"), [(8, False), (0, True)])
def test_local_steps_that_were_replayed_were_not_read_as_one_gradient(folders, data, tmp_path, replayed, flagged):
    client = {"optimizer": "sgd", "learning_rate": 0.01, "epochs": 3}
    attack = {"name": "tag", "steps": 2, "replayed_steps": replayed}
    ready = make(folders, data, "bert", client=client, attack=attack, knowledge={"labels": True, "lengths": True})
    record = next(audit.run(ready, tmp_path / "out"))
    assert record.error is None
    assert ("delta-as-gradient" in record.flags) == flagged
    assert ("replayed_steps" in record.details) != flagged


@pytest.mark.parametrize(("optimizer", "flagged"), [("adamw", True), ("sgd", False)])
def test_an_attack_that_learns_masks_does_not_where_it_replays(folders, data, optimizer, flagged):
    """Steps of AdamW are replayed with dropout off; one of SGD is a gradient, whose masks are learned."""
    short = {"rounds": 1, "steps": 2, "starts": 4, "permutations": 2, "passes": 1, "beam_width": 2}
    client = {"optimizer": optimizer, "learning_rate": 0.01, "dropout": True}
    record, _ = audit_batch(make(folders, data, "bert", client=client, attack={"name": "grab", **short}), 0)
    assert record.error is None
    assert ("dropout-not-modeled" in record.flags) == flagged


def test_flags_name_what_was_done(folders, data: Path, tmp_path: Path):
    noise = {"name": "gaussian", "sigma": 0.1, "relative": False}
    unaware = {"defenses": False}
    ready = make(folders, data, "bert", client={"dropout": True}, defense=[noise], knowledge=unaware)
    record, _ = audit_batch(ready, 0)
    assert {"dropout-not-modeled", "defense-not-modeled", "word-rows-shared"} <= set(record.flags)
    assert "defenses" not in record.knowledge
    with pytest.raises(NotSupportedError, match="no counter to 'gaussian' here, of which it was told"):
        make(folders, data, "bert", defense=[noise])
    told = make(folders, data, "bert", defense=[noise], attack={"name": "decode"})
    assert audit_batch(told, 0)[0].knowledge["defenses"] == [noise]
    quiet, _ = audit_batch(make(folders, data, "bert", selection={"tensors": "0-1:q,k,v"}), 0)
    assert not {"dropout-not-modeled", "defense-not-modeled", "word-rows-shared"} & set(quiet.flags)
    assert quiet.share_of_parameters < 0.5


def test_what_is_not_given_is_not_there(folders, data: Path):
    ready = make(folders, data, knowledge={"batch_size": False, "training": False, "dropout": False, "defenses": False})
    record, _ = audit_batch(ready, 0)
    assert set(record.knowledge) == {"selection", "update"}


def test_missing_knowledge_is_said_before_anything_runs(folders, data: Path):
    with pytest.raises(MissingKnowledgeError, match="batch_size"):
        make(folders, data, attack={"name": "tag"}, knowledge={"batch_size": False})


def test_a_selection_of_frozen_parameters_is_refused(folders, data: Path):
    with pytest.raises(BadInputError, match="only frozen"):
        make(folders, data, client={"freeze": ["embeddings"]}, selection={"tensors": "embeddings"})


def test_classification_needs_a_label_column(folders, data: Path):
    with pytest.raises(BadInputError, match="label"):
        make(folders, data, data={"label": None})


def test_causal_lm_needs_no_label_and_loses_the_last_token(folders, data: Path):
    record, texts = audit_batch(make(folders, data, data={"label": None}, task="causal-lm"), 0)
    assert record.error is None
    # nothing is predicted from a sentence's last token and nothing attends to it: theory forbids finding it
    assert [words[:-1] for words in texts.original_words] == list(texts.recovered_words)


def test_a_long_text_is_cut_and_flagged(folders, tmp_path: Path):
    path = tmp_path / "long.csv"
    path.write_text("text,label\n" + " ".join(tiny_models.WORDS[:90]) + ",1\nriver stone,0\n", encoding="utf8")
    record, _ = audit_batch(make(folders, path, data={"batch_size": 1, "batches": 1}), 0)
    assert "truncated" in record.flags
    assert record.tokens == tiny_models.LONGEST


def test_a_full_disk_loses_nothing(folders, data: Path, tmp_path: Path, monkeypatch):
    ready, out = make(folders, data), tmp_path / "out"
    real = os.write

    def full(handle: int, data: bytes) -> int:
        if b'"batch":1' in data:
            raise OSError(28, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(BadInputError, match=r"No space left.*kept"):
        list(audit.run(ready, out))
    assert [r.batch for r in read_lines(out / "records.jsonl", Record)] == [0]


@pytest.mark.parametrize("refused", ['"scores"', '"program"', '"originals"'])
def test_a_disk_that_is_full_once_leaves_a_folder_that_goes_on(
    folders, data: Path, tmp_path: Path, monkeypatch, refused
):
    """Whichever write it refuses, of a record, of run.json or of the texts: afterwards all is there, and once."""
    ready, out = make(folders, data), tmp_path / "out"
    write, write_text = os.write, Path.write_text

    def full(handle: int, content: bytes) -> int:
        if refused.encode() in content and (b'"batch":1' in content):
            write(handle, content[:40])
            raise OSError(28, "No space left on device")
        return write(handle, content)

    def full_text(self: Path, text: str, **how) -> int:
        if refused in text:
            write_text(self, text[:40], **how)
            raise OSError(28, "No space left on device")
        return write_text(self, text, **how)

    with monkeypatch.context() as inside:
        inside.setattr(os, "write", full)
        inside.setattr(Path, "write_text", full_text)
        with pytest.raises(BadInputError, match="No space left"):
            list(audit.run(ready, out))
    list(audit.run(ready, out))
    assert RunInfo.model_validate_json((out / INFO).read_bytes()).case == ready.case.content_hash()
    for name, kind in ((RECORDS, Record), ("texts.jsonl", Texts)):
        assert [line.batch for line in read_lines(out / name, kind)] == [0, 1, 2], name


def test_a_damaged_run_json_is_written_anew(folders, data: Path, tmp_path: Path):
    ready, out = make(folders, data), tmp_path / "out"
    list(audit.run(ready, out))
    (out / INFO).write_text('{"program": "0.1')
    assert len(list(audit.run(ready, out))) == 3
    assert RunInfo.model_validate_json((out / INFO).read_bytes()).case == ready.case.content_hash()


HELD = """
import sys
from gradaudit import cli
from gradaudit.audit import run as audit

audit_batch = audit.audit_batch


def held(ready, index):
    if index == 2:
        print("held", file=sys.__stdout__, flush=True)  # with --json, what others print goes elsewhere
        sys.stdin.read()  # until it is killed, or who started it is gone
    return audit_batch(ready, index)


audit.audit_batch = held
cli.main()
"""
"""The program, which stops and waits in its third batch."""


def test_kill_minus_nine_in_mid_run_then_resume(folders, data: Path, tmp_path: Path, gradaudit):
    case = tmp_path / "case.toml"
    case.write_text(
        f'model = "random:{folders["bert"]}"\n[data]\npath = "{data}"\nlabel = "label"\nbatch_size = 1\nbatches = 6\n'
        '[attack]\nname = "tag"\nsteps = 3\n',
        encoding="utf8",
    )
    command = ["run", str(case), "--out", str(tmp_path / "out"), "--json"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", HELD, *command], text=True, **pipes) as process:
        assert process.stdout is not None
        assert "held\n" in process.stdout, "it ended before"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    records = tmp_path / "out" / "records.jsonl"
    before = records.read_bytes()
    assert before.count(b"\n") == 2
    code, out, _ = gradaudit(*command)
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["batch"] for line in lines[:-1]] == list(range(6))
    assert lines[-1]["summary"] is True
    assert lines[-1]["n"] == 6
    assert records.read_bytes().startswith(before)
    assert records.read_bytes().count(b"\n") == 6, "what was done is not done again"


def test_the_device_is_named_or_refused():
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(BadInputError, match="device"):
        pick_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(BadInputError, match="not there"):
            pick_device("cuda")
