"""Tables of results: the command, commit and setting on top, and notes written by hand that stay below."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

_NOTES = "\n## Notes\n"


@cache  # asked before the first table, which is a file of the repository, changes
def commit() -> str:
    """Return the commit of the code that runs, with a plus sign where files differ from it."""
    told = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def command() -> str:
    """Return the command that is running, as one would type it again."""
    threads = os.environ.get("OMP_NUM_THREADS")
    return (f"OMP_NUM_THREADS={threads} " if threads else "") + "python " + shlex.join(sys.argv)


def write_table(place: Path, head: str, table: str) -> None:
    """Write a table under its head; what stands under "## Notes" in the file stays.

    Args:
        place: the file.
        head: how it was made.
        table: Markdown rows.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    before = place.read_text(encoding="utf8") if place.exists() else ""
    _, mark, notes = before.partition(_NOTES)
    place.write_text(f"{head}\n\n{table.rstrip()}\n{mark}{notes}", encoding="utf8")
