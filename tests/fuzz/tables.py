"""A page of counts, printed and written: its head says command, commit, machine and time."""

from __future__ import annotations

import argparse
import platform
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

Page = Callable[[argparse.Namespace, random.Random], list[str]]


def stated() -> str:
    """Return the command that runs, the commit it is of, and the machine."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "of no commit"
    spec = sys.modules["__main__"].__spec__
    command = f"python -m {spec.name if spec else sys.argv[0]} {shlex.join(sys.argv[1:])}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}"
    return f"`{command}` at {commit}, {platform.machine()}, one thread, {versions}"


def rows(columns: tuple[str, ...], cells: list[tuple[object, ...]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(map(str, row))} |" for row in [columns, ("---",) * len(columns), *cells]]


def write_page(options: dict[str, tuple[int, str]], page: Page) -> None:
    """Run a page by the command line's options, print it and write it.

    Args:
        options: default and meaning of each number that `page` is given, by name; --seed and --write are added.
        page: returns the lines, of which the first is the title and the second says what was tried.
    """
    told = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    for name, (default, meaning) in (options | {"seed": (0, "of all that is drawn")}).items():
        told.add_argument(f"--{name}", type=int, default=default, help=meaning)
    told.add_argument("--write", type=Path, help="file of the page")
    given = told.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    title, tried, *lines = page(given, random.Random(given.seed))
    head = f"{stated()}, {time.perf_counter() - began:.0f} s, shared; {tried}"
    text = "\n".join([f"# {title}", "", head, "", *lines, ""])
    print(text)
    if given.write is not None:
        given.write.write_text(text, encoding="utf8")
