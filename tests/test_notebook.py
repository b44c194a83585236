"""The example: the program runs, and the notebook is made of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from gradaudit.api.outcome import Outcome
from gradaudit.errors import BadInputError

EXAMPLES = Path(__file__).parent.parent / "examples"
PROGRAM = (EXAMPLES / "first_audit.py").read_text(encoding="utf8")
CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def cells() -> list[tuple[str, str]]:
    """Return kind and text of every cell of the program, as a notebook holds them."""
    parts = CELL.split(PROGRAM)[1:]
    found = []
    for markdown, body in zip(parts[::2], parts[1::2], strict=True):
        text = body.strip()
        found.append(("markdown", re.sub(r"^# ?", "", text, flags=re.MULTILINE)) if markdown else ("code", text))
    return found


def test_the_program_runs(folders, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    tiny = str(folders["bert"])
    monkeypatch.setattr("gradaudit.models.packages.minilm_folder", lambda: tiny)
    program = PROGRAM.replace('MODEL = "minilm"', f'MODEL = "random:{tiny}"').replace(
        "from_pretrained(FOLDER, num_labels=2)", "from_config(AutoConfig.from_pretrained(FOLDER, num_labels=2))"
    ).replace("import AutoModelFor", "import AutoConfig, AutoModelFor")  # fmt: skip
    program = program.replace("budget=60", "budget=5").replace('out="results"', 'out="results", budget=5')
    words = iter(("river stone", "quiet garden", "blue whale", "warm bread"))
    program = re.sub(r'\("[A-Z][^"]+\.", "(health|money)"\)', lambda m: f'("{next(words)}", "{m[1]}")', program)
    exec(compile(program, "first_audit.py", "exec"), {"__name__": "first_audit"})  # noqa: S102 - our own program
    printed = capsys.readouterr().out
    assert "report.html" in printed
    assert "auto (decode)" in printed
    assert {"river stone", "quiet garden"} <= set(printed.splitlines())


def test_the_notebook_is_made_of_the_program_and_was_run():
    book = json.loads((EXAMPLES / "first_audit.ipynb").read_text(encoding="utf8"))
    made = [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]]
    assert made == cells(), "jupytext --to ipynb --execute examples/first_audit.py"
    shown = json.dumps([cell.get("outputs") for cell in book["cells"]])
    assert "proven" in shown
    assert "image/png" in shown
    assert "/root" not in shown
    assert "/home" not in shown


def outcome(*rows: dict) -> Outcome:
    return Outcome("auto (decode)", "Private <b>text</b>", (), None, rows)


def test_a_drawing_shows_every_sentence_and_no_text():
    pytest.importorskip("matplotlib").use("agg")
    rows = [{"recovered": "secret", "certificate": kind, "rougeL": score}
            for kind, score in (("proven", 100.0), ("guess", 10.0), (None, 50.0))]  # fmt: skip
    axes = outcome(*rows).plot()
    assert [c.get_label() for c in axes.collections] == ["proven", "guess", "no certificate"]
    assert [tuple(c.get_offsets()[0]) for c in axes.collections] == [(1, 100), (3, 10), (2, 50)]
    assert len({c.get_paths()[0].vertices.tobytes() for c in axes.collections}) == 3, "shapes, not colors alone"
    counted = outcome({"recovered": "secret", "certificate": "proven"}).plot()
    assert [bar.get_width() for bar in counted.patches] == [1, 0, 0, 0]
    assert not outcome().plot().collections


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadInputError, match=r"gradaudit\[figures\]"):
        outcome().plot()


def test_a_card_is_harmless_html():
    assert "Private &lt;b&gt;text" in outcome()._repr_html_()
