"""The programs of benchmarks/: each imports, takes public names alone and builds its grid;
the runner goes on after a kill and counts what failed."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gradaudit.case import parse_case

FOLDER = Path(__file__).parent.parent / "benchmarks"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))
NEEDS = {
    "curves": "matplotlib",
    "exact_decoding_figures": "matplotlib",
    "real_updates_figures": "matplotlib",
    "vision": "pyarrow",
    "picture_grid": "pyarrow",
}


@pytest.fixture(autouse=True)
def importable() -> Iterator[None]:
    """Programs import one another by their plain names, which are forgotten after."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in PROGRAMS:
        sys.modules.pop(name, None)


@pytest.fixture
def grid() -> ModuleType:
    return importlib.import_module("grid")


def test_the_docs_frontiers_are_drawn_from_their_table_and_say_which_decode_was_measured():
    figures = importlib.import_module("frontier_figures")
    found = figures.frontiers(figures.TABLE.read_text(encoding="utf8"))
    assert [len(one.points) for one in found] == [33, 33]
    assert [one.chosen and one.chosen.client for one in found] == [None, "clip norm=1.0; gaussian sigma=0.001"]
    for one in found:
        held = (FOLDER.parent / "docs" / figures.DRAWN[one.batch_size]).read_text(encoding="utf8")
        assert held == figures.drawing_alone(one, figures.NOTE)
        assert "earlier decode" in held


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_imports_and_every_cell_is_a_case_in_a_folder_of_its_own(name: str):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    found = importlib.import_module(name)
    if hasattr(found, "PROGRAM"):
        program = found.PROGRAM
        given = program.parser().parse_args([])
        for cells in program.groups.values():
            made = cells(given)
            assert len({cell.place or parse_case(cell.case()).content_hash() for cell in made}) == len(made) > 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_takes_a_private_name_of_gradaudit(name: str):
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradaudit":
            names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        if isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            names.add(node.attr)
    assert not [name for name in names if name.startswith("_") and not name.startswith("__")]


def test_a_grid_goes_on_after_an_interrupted_cell_and_counts_a_failing_one(
    grid: ModuleType,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    from gradaudit.audit import run as audit

    data = {"source": "sample", "batches": 3}
    tiny = {"model": f"random:{folders['bert']}", "attack": {"name": "blind"}}
    cells = [
        grid.Cell(title="first", name="first", batches=3, more={"data": data}, **tiny),
        grid.Cell(title="broken", name="broken", more={"data": {"path": "nowhere.csv"}}, **tiny),
        grid.Cell(title="last", name="last", batches=3, more={"data": data}, **tiny),
    ]
    program = grid.Program(
        about="a test",
        groups={"group": lambda given: cells},
        columns=("cell", "batches", "failed"),
        table=grid.each(
            lambda one: [one.cell.title, str(len(one.records)), str(sum(r.error is not None for r in one.records))]
        ),
        words=lambda group, given: "Words.",
        results=tmp_path / "results",
        records=tmp_path / "records",
    )
    monkeypatch.setattr(grid, "ready_process", lambda: None)
    audited, ran = audit.audited, []

    def interrupted(ready, index, out):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append((out.name, index))
        return audited(ready, index, out)

    monkeypatch.setattr(audit, "audited", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grid.main(program, ["group", "--device", "cpu"])

    def counted(ready, index, out):
        ran.append((out.name, index))
        return audited(ready, index, out)

    monkeypatch.setattr(audit, "audited", counted)
    assert grid.main(program, ["group", "--device", "cpu"]) == 1, "a cell failed"
    assert ran == [(name, index) for name in ("first", "last") for index in range(3)], "none twice"
    written = (tmp_path / "results" / "group.md").read_text(encoding="utf8")
    assert "| first | 3 | 0 |" in written
    assert "| last | 3 | 0 |" in written
    assert "Failed cells, 1 of 3: broken: there is no file nowhere.csv" in written
    assert "(commit " in written
    assert "failed: broken" in capsys.readouterr().err
    assert grid.main(program, ["group", "--table"]) == 0
    assert len(ran) == 6, "--table runs nothing"


def test_notes_stay_below_a_table_that_is_written_again(grid: ModuleType, tmp_path: Path):
    file = tmp_path / "a.md"
    grid.write_table(file, "Head.", grid.markdown(("a", "b"), [["1", "2"]]))
    file.write_text(file.read_text() + "\n## Notes\n\nBy hand.\n", encoding="utf8")
    grid.write_table(file, "New head.", grid.markdown(("a", "b"), [["3", "4"]]))
    text = file.read_text(encoding="utf8")
    assert text == "New head.\n\n| a | b |\n|---|---|\n| 3 | 4 |\n\n## Notes\n\nBy hand.\n"


def test_a_group_that_is_none_is_refused(grid: ModuleType, capsys: pytest.CaptureFixture[str]):
    program = importlib.import_module("matching").PROGRAM
    with pytest.raises(SystemExit):
        grid.main(program, ["ordr"])
    assert "'ordr' is no group: choose of order" in capsys.readouterr().err
