"""Runs a benchmark: a grid of cases, finished cells read again, a table with how it was made.

A program declares its cells, columns and words as a `Program` and calls `main`. Records hold no text.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gradaudit.audit.fitting import INVERTERS
from gradaudit.audit.info import RECORDS
from gradaudit.audit.prepare import pick_device, prepare
from gradaudit.audit.run import run
from gradaudit.case import parse_case
from gradaudit.errors import AuditError
from gradaudit.files import read_lines
from gradaudit.leakage.matching.compiled import compiling
from gradaudit.machine import ready_process
from gradaudit.record import Interval, Record

DATA = {"cola": {"source": "cola"}, "sst2": {"source": "sst2"}, "rt": {"source": "rotten-tomatoes"}}
"""[data] by its short name in a table."""
PRACTICAL = {"dropout": True, "freeze": ["embeddings"]}
OFF = {"dropout": False}
LEARNING = "learning.txt"
"""File beside a cell's records: seconds that its attack took to learn."""
NOTES = "\n## Notes\n"
"""What is written by hand in a file of results stands under it and stays."""
VERSIONS = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class Cell:
    """One case of a grid.

    Args:
        data: key of `DATA`.
        size: batch size.
        batches: how many.
        client: the [client] table.
        model: the case's model.
        tensors: what the attacker sees.
        seed: of the draw; 101 is the papers', of which some batches were used in development.
        defense: [[defense]] tables.
        published: what to compare with, in words.
        title: what the table calls it.
        attack: the [attack] table.
        name: folder of its records; the case's id when empty.
        more: other keys of the case, over those that are made of the fields above.
        facts: what the program's row needs beside.
    """

    data: str = "cola"
    size: int = 1
    batches: int = 1
    client: Mapping[str, Any] = field(default_factory=lambda: dict(OFF))
    model: str = "minilm"
    tensors: str = "all"
    seed: int = 101
    defense: Sequence[Mapping[str, Any]] = ()
    published: str = ""
    title: str = ""
    attack: Mapping[str, Any] = field(default_factory=lambda: {"name": "decode"})
    name: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The folder of its records."""
        return "".join("-" if c in " :/" else c for c in self.name if c != ",")

    def case(self) -> dict[str, Any]:
        """Return the case file's content."""
        made: dict[str, Any] = {
            "name": self.title or self.name,
            "model": self.model,
            "client": dict(self.client),
            "selection": {"tensors": self.tensors},
            "defense": [dict(d) for d in self.defense],
            "attack": dict(self.attack),
            "metrics": {"diagnose": False},
        }
        if "data" not in self.more:
            drawn = {"shuffle_seed": self.seed, "batch_size": self.size, "batches": self.batches}
            made["data"] = DATA[self.data] | drawn
        return made | dict(self.more)


@dataclass(frozen=True)
class Done:
    """A cell that was run: its records, and the seconds that its attack took to learn, where it did."""

    cell: Cell
    records: list[Record]
    learning: float | None = None


def mean_of(scores: Mapping[str, Interval] | None, name: str) -> str:
    """Return the mean of one of the scores of words for a table; "-" where no batch has it."""
    mean = scores[name].mean if scores and name in scores else 0.0
    return "-" if mean is None else f"{mean:.1f}"


Options = argparse.Namespace
Table = Callable[[Sequence[Done]], list[list[str]]]


def each(row: Callable[[Done], list[str]]) -> Table:
    """Return the table of rows that do not depend on one another."""
    return lambda done: [row(one) for one in done if one.records]


@dataclass(frozen=True)
class Program:
    """What a benchmark declares.

    Args:
        about: the program's docstring, for `--help`.
        groups: for each name, its cells, of the options.
        columns: of the tables; by group where they differ.
        table: rows of cells that are done.
        words: what the head of a group's table says of its setting, of group and options.
        results: the tables' folder; one file a group.
        records: folder for the records.
        options: adds options of its own to the command line.
        before: writes what a group's cells read, before they run.
        interleaved: batch by batch through all cells, so that a group that is stopped has as many of each.
        shared_inverters: cells keep what they learn in one folder; without, it is deleted behind each cell.
        files: names of the files of results, where a group's is another than its own.
        further: records beside a cell's own, of the options, the cell and its prepared case.
        measured: groups that are no cells, each written by itself.
    """

    about: str
    groups: Mapping[str, Callable[[Options], list[Cell]]]
    columns: Mapping[str, Sequence[str]] | Sequence[str]
    table: Table
    words: Callable[[str, Options], str]
    results: Path
    records: Path = Path("out/benchmarks")
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    before: Callable[[str, Options], None] = lambda group, given: None
    interleaved: bool = False
    shared_inverters: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    further: Callable[[Options, Cell, Any], list[Record]] | None = None
    measured: Mapping[str, Callable[[Options], None]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of all groups."""
        return [*self.groups, *self.measured]

    def parser(self) -> argparse.ArgumentParser:
        """Return the command line."""
        made = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        made.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(self.names)}; all when none")
        made.add_argument("--out", type=Path, default=self.records, help="folder for the records")
        made.add_argument("--write", type=Path, default=self.results, help="tables' folder")
        made.add_argument("--batches", type=int, default=0, help="at most so many a cell; 0 for all")
        made.add_argument("--rows", default="", help="only these cells of the groups, as 0,1")
        made.add_argument("--table", action="store_true", help="run nothing, write the tables of what is there")
        made.add_argument("--device", default="auto")
        made.add_argument("--compile", action="store_true", help="compile the steps of a matching attack")
        self.options(made)
        return made


class Runner:
    """Runs cells one by one and keeps the last model loaded; adapters are trained for each cell anew."""

    def __init__(self, program: Program, given: Options) -> None:
        self.program, self.given = program, given
        self.device = pick_device(given.device)
        self.failed: dict[str, str] = {}
        self._loaded: Any = None

    def started(self, cell: Cell) -> tuple[Any, Path]:
        """Return a cell's prepared case and its folder."""
        case = parse_case(cell.case())
        ready = prepare(case, Path.cwd(), self.device, self._loaded)
        self._loaded = ready.model
        place = self.given.out / (cell.place or case.content_hash())
        return ready, place

    def finished(self, cell: Cell, most: int) -> Done:
        """Run what is missing of a cell, up to so many batches (0 for all); an error is kept and shown."""
        records: list[Record] = []
        learning: float | None = None
        try:
            ready, place = self.started(cell)
            shared = self.given.out / INVERTERS if self.program.shared_inverters else None
            began = time.perf_counter()
            with closing(run(ready, place, inverters=shared)) as found:  # type: ignore[type-var]
                for record in found:
                    if not records and ready.attack.unfitted and not (place / LEARNING).exists():
                        (place / LEARNING).write_text(f"{time.perf_counter() - began - record.seconds:.1f}")
                    records.append(record)
                    if len(records) == most:
                        break
            if (place / LEARNING).exists():
                learning = float((place / LEARNING).read_text())
            if self.program.further is not None:
                records += self.program.further(self.given, cell, ready)
            if shared is None and len(records) == len(ready.batches):
                shutil.rmtree(place / INVERTERS, ignore_errors=True)  # hundreds of megabytes each
        except AuditError as error:
            self.failed[cell.title or cell.name] = str(error)
        return Done(cell, records, learning)

    def read(self, cell: Cell) -> Done:
        """Return what is there of a cell, without running anything."""
        place = self.given.out / (cell.place or parse_case(cell.case()).content_hash())
        learning = place / LEARNING
        records = list(read_lines(place / RECORDS, Record))
        return Done(cell, records, float(learning.read_text()) if learning.exists() else None)

    def group(self, name: str) -> None:
        """Run a group and write its table after every cell."""
        self.failed = {}
        if not self.given.table:
            self.program.before(name, self.given)
        cells = self.program.groups[name](self.given)
        if self.given.rows:
            cells = [cells[int(n)] for n in self.given.rows.split(",")]
        if self.given.table:
            self.write(name, [self.read(cell) for cell in cells])
            return
        rounds = [self.given.batches]
        if self.program.interleaved:
            rounds = list(range(1, 1 + (self.given.batches or max(cell.batches for cell in cells))))
        for most in rounds:
            done: list[Done] = []
            for cell in cells:
                done.append(self.finished(cell, most))
                if not self.program.interleaved:
                    self.write(name, done)
                print(f"{name}: {cell.title or cell.place}, {len(done[-1].records)} batches", flush=True)
            self.write(name, done)

    def write(self, name: str, done: Sequence[Done]) -> None:
        """Write a group's table; cells that failed are named below it."""
        given = self.given
        rows = self.program.table(done) if any(one.records for one in done) else []
        columns = self.program.columns
        lines = markdown(columns[name] if isinstance(columns, Mapping) else columns, rows)
        if self.failed:
            lines += f"\n\nFailed cells, {len(self.failed)} of {len(done)}: "
            lines += " ".join(f"{title}: {said}." for title, said in self.failed.items())
        file = self.program.files.get(name, name)
        write_table(given.write / f"{file}.md", f"{made(self.device)} {self.program.words(name, given)}", lines)


def main(program: Program, arguments: Sequence[str] | None = None) -> int:
    """Run the groups that a command line asks for; 1 where a cell failed."""
    parser = program.parser()
    given = parser.parse_args(arguments)
    for name in given.groups:
        if name not in program.names:
            parser.error(f"'{name}' is no group: choose of {', '.join(program.names)}")
    ready_process()
    commit()
    runner, failed = Runner(program, given), False
    with compiling(given.compile):
        for name in given.groups or program.names:
            if name in program.measured:
                program.measured[name](given)
                continue
            runner.group(name)
            failed |= bool(runner.failed)
            for title, said in runner.failed.items():
                print(f"failed: {title}: {said}", file=sys.stderr)
    return int(failed)


def options(about: str | None) -> argparse.ArgumentParser:
    """Return the command line of a program that is no grid."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


@cache  # asked before the first table, which is a file of the repository, changes
def commit() -> str:
    """Return the commit of the code that runs, with a plus sign where files differ from it."""
    told = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def command() -> str:
    """Return the command that is running, as one would type it again."""
    threads = os.environ.get("OMP_NUM_THREADS")
    return (f"OMP_NUM_THREADS={threads} " if threads else "") + "python " + shlex.join(sys.argv)


def made(device: torch.device | str = "cpu") -> str:
    """Return the first sentence of a file of results: command, commit, machine, versions."""
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s), {device}"
    versions = ", ".join([f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in VERSIONS)])
    return f"Made by `{command()}` (commit {commit()}) on {machine}; {versions}."


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def write_table(place: Path, head: str, table: str) -> None:
    """Write a table under its head; what stands under "## Notes" in the file stays.

    Args:
        place: the file.
        head: how it was made.
        table: Markdown rows.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    before = place.read_text(encoding="utf8") if place.exists() else ""
    _, mark, notes = before.partition(NOTES)
    place.write_text(f"{head}\n\n{table.rstrip()}\n{mark}{notes}", encoding="utf8")
