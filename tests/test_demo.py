"""The demo, and the example of a user's own training, on the real MiniLM."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from gradaudit import demo
from gradaudit.bundles.bundle import load_bundle
from gradaudit.report.render import render

pytestmark = pytest.mark.minilm
EXAMPLE = Path(__file__).parent.parent / "examples" / "audit_my_training.py"


def test_the_demo_shows_what_leaks(tmp_path: Path, monkeypatch):
    # the same demo with a smaller matching budget, so that the test stays short
    short = {"name": "tag", "steps": 3}
    quick = {
        name: tuple(short if attack["name"] == "tag" else attack for attack in attacks)
        for name, attacks in demo.ATTACKS.items()
    }
    monkeypatch.setattr(demo, "ATTACKS", quick)
    done = demo.run_demo(tmp_path, torch.device("cpu"))
    by = {(r.setting, r.attack): r for r in done}
    assert {r.error for r in done} == {None}
    assert by["dropout off", "dager"].scores["exact"] == 100.0
    assert by[demo.PRACTICAL, "dager"].scores["exact"] == 0.0
    assert by[demo.PRACTICAL, "decode"].scores["exact"] == 100.0
    assert by[demo.PRACTICAL, "decode"].certificates == {"proven": 4}
    trainer = by[demo.TRAINER, "decode"]
    assert trainer.scores["exact"] == 100.0
    assert sum(trainer.certificates.values()) == 4
    assert trainer.certificates.keys() <= {"proven", "likely"}, "which of the two hangs on the draw of the masks"
    assert trainer.knowledge["training"]["optimizer"] == "adamw"
    assert trainer.words is not None
    assert (trainer.words.precision, trainer.words.recall) == (100.0, 100.0)
    adapters = by[demo.ADAPTERS, "decode"].words
    assert adapters is not None
    assert (adapters.precision, adapters.recall, adapters.certain) == (100.0, 100.0, 100.0)
    assert all(r.batch_size == 4 for r in done)
    report = render(tmp_path, show_text=True).read_text()
    assert "insulin" in report
    assert "insulin" not in render(tmp_path).read_text()
    assert len(report.encode()) < 1_000_000
    again = demo.run_demo(tmp_path, torch.device("cpu"))
    assert [r.model_dump() for r in again] == [r.model_dump() for r in done]
    back = load_bundle(tmp_path / "update")
    assert back.manifest.model.name == "minilm"
    assert back.manifest.knowledge["dropout"] == pytest.approx(0.1)


def test_the_example_recovers_the_messages_from_both_loops(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--out", str(tmp_path)])
    found = runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    loops = printed.split("Trainer:")
    assert len(loops) == 2
    for loop in loops:
        for message in found["MESSAGES"]:
            assert message.lower() in loop
