"""The program on one input, in a copy of the corpus: what it printed and how it ended."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from fuzz.inputs import Input
from gradaudit import cli


@dataclass(frozen=True)
class Outcome:
    """How the program ended.

    Args:
        code: its exit code.
        said: standard output and error.
    """

    code: int
    said: str

    def fault(self, given: Input) -> str:
        """Return what is wrong with it; empty for nothing."""
        if "Traceback" in self.said or "this is a bug" in self.said:
            return "traceback"
        if self.code not in given.codes:
            return f"exit code {self.code}"
        return "silent" if self.code and not self.said.strip() else ""


@contextmanager
def placed(given: Input, root: Path) -> Iterator[Path]:
    """Copy the corpus into a folder of its own and put the input's files there."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "it"
        shutil.copytree(root, folder)
        for path, content in given.files.items():
            (folder / path).write_bytes(content)
        yield folder


def ended(given: Input, folder: Path) -> Outcome:
    """Run the program in this process, in a folder."""
    said, before = io.StringIO(), sys.argv
    sys.argv = ["gradaudit", *given.arguments]
    try:
        with chdir(folder), redirect_stdout(said), redirect_stderr(said):
            cli.main()
    except SystemExit as end:
        return Outcome(int(end.code or 0), said.getvalue())
    finally:
        sys.argv = before
    raise AssertionError("the program returned")
