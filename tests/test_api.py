"""The Python API, and the case that `init` writes: what a newcomer runs first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gradaudit as ga
import tiny_models
from gradaudit.catalog import EXAMPLE
from gradaudit.errors import BadInputError

TEXTS = tiny_models.sentences([4, 3, 5, 4], seed=3)
QUICK = ['attack={name="dager"}', "client.dropout=false", "data.batch_size=2"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "my.csv"
    rows.write_text("body,topic\n" + "".join(f"{t},{i % 2}\n" for i, t in enumerate(TEXTS)), encoding="utf8")
    return rows


def test_the_package_shows_what_it_offers():
    assert set(dir(ga)) == {"attack", "bundle", "capture", "run", "__version__"}
    assert all(callable(getattr(ga, name)) for name in ga.__all__)


def test_a_run_and_what_it_returns(data: Path, folders):
    model = f"random:{folders['llama']}"
    found = ga.run("my.csv", text="body", label="topic", model=model, attack="dager", settings=QUICK[1:])
    assert sorted(found.sentences) == sorted(TEXTS[:2])
    assert all(row["exact"] for row in found.rows())
    assert list(found.to_frame().columns) == list(found.rows()[0])
    assert not any(text in repr(found) for text in TEXTS)
    page = found.report("mine.html", show_text=True)
    assert found.sentences[0].split()[0] in page.read_text(encoding="utf8")
    assert found.folder is not None
    assert not (found.folder / "report.html").exists()
    again = ga.run("my.csv", text="body", label="topic", settings=[*QUICK, f"model={model}"])
    assert again == found, "the second call reads what the first has finished"


def test_a_bundle_gives_sentences_and_no_report(data: Path, load):
    model = load("gpt2")
    batch = dict(model.tokenizer(TEXTS[:2], padding=True, return_tensors="pt"))
    with ga.capture(model.module, "my-update", tokenizer=model.tokenizer):
        model.module(**batch, labels=torch.tensor([0, 1])).loss.backward()
    model.module.zero_grad()
    found = ga.attack("my-update", "dager")
    assert sorted(found.sentences) == sorted(TEXTS[:2])
    assert found.folder is None
    assert "nobody compared" in found.verdict
    with pytest.raises(BadInputError, match="no report"):
        found.report("mine.html")


def test_columns_beside_a_case_are_refused(data: Path):
    with pytest.raises(BadInputError, match="a data file"):
        ga.run({"attack": {"name": "blind"}}, text="body")


def test_init_writes_a_case_that_runs(gradaudit, data: Path, folders):
    told = ("init", "--data", "my.csv", "--text", "body", "--out", "cases.toml", "--label", "topic")
    code, out, _ = gradaudit(*told)
    assert (code, "gradaudit check cases.toml" in out) == (0, True)
    settings = [part for s in [*QUICK, f"model=random:{folders['llama']}"] for part in ("--set", s)]
    assert gradaudit("check", "cases.toml", *settings)[0] == 0
    assert gradaudit("run", "cases.toml", *settings)[0] == 0
    code, _, err = gradaudit(*told)
    assert code == 2
    assert "already there" in err


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (("--data", "mine.csv"), "there is no file mine.csv"),
        (("--data", "my.csv", "--text", "bdy"), "did you mean 'body'?"),
        (("--data", "my.csv", "--text", "body", "--label", "class"), "has no column 'class'"),
    ],
)
def test_init_says_what_is_not_there(gradaudit, data: Path, told, said):
    code, _, err = gradaudit("init", *told)
    assert (code, said in err) == (2, True), err
    assert not Path("case.toml").exists()


def test_the_example_case_needs_no_file_of_the_reader(gradaudit, data: Path, folders):
    Path("case.toml").write_text(EXAMPLE, encoding="utf8")
    assert gradaudit("check", "case.toml", "--set", f"model=random:{folders['llama']}")[0] == 0
