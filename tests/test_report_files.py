"""Reports on disk: whole, private when they show text, and a sentence for what is missing."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from gradaudit.errors import BadInputError
from gradaudit.report.render import render
from made_reports import (
    make_folder,
    make_info,
    make_summaries,
)

# --- files ---


@pytest.fixture
def summaries_here(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = pytest.importorskip("gradaudit.metrics.summary")
    assert callable(summary.summarize)
    monkeypatch.setattr(summary, "summarize", make_summaries)


@pytest.mark.usefixtures("summaries_here")
def test_report_is_written_whole_and_private(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    path = render(folder)
    assert path == folder / "report.html"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "zbigniew" not in path.read_text().casefold()
    assert stat.S_IMODE(render(folder, show_text=True).stat().st_mode) == 0o600
    assert "Zbigniew" in path.read_text()
    assert sorted(p.name for p in folder.iterdir()) == [
        "records.jsonl",
        "report.html",
        "run.json",
        "texts.jsonl",
    ]


def test_report_uses_the_real_summaries(tmp_path: Path) -> None:
    pytest.importorskip("gradaudit.metrics.summary")
    assert "<title>Leaks: embedded sample, minilm, 21 November 2025" in render(make_folder(tmp_path)).read_text()


@pytest.mark.usefixtures("summaries_here")
def test_a_failed_write_keeps_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path)
    (folder / "report.html").write_text("old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(BadInputError, match="No space left on device"):
        render(folder)
    assert (folder / "report.html").read_text() == "old"
    assert not list(folder.glob(".new-*"))


@pytest.mark.usefixtures("summaries_here")
def test_missing_and_damaged_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no run\.json.*gradaudit run \.\.\. --out DIR"):
        render(tmp_path)
    (tmp_path / "run.json").write_text("")
    with pytest.raises(BadInputError, match=r"run\.json is empty or damaged.*gradaudit run"):
        render(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"program": 1}))
    with pytest.raises(BadInputError, match="damaged"):
        render(tmp_path)
    (tmp_path / "run.json").write_text(make_info().model_dump_json())
    with pytest.raises(BadInputError, match=r"no records yet.*gradaudit run"):
        render(tmp_path)
    (tmp_path / "records.jsonl").write_text('{"case": 1}\n')
    with pytest.raises(BadInputError, match="line 1 is not a Record"):
        render(tmp_path)
