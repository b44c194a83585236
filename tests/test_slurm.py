"""The page's lines for SLURM, run by a stand-in for `sbatch` that starts what SLURM would, one task after the other."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import tiny_models
from gradaudit.sweeps.result import TABLE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "integrations.md"
SBATCH = """
import os, re, subprocess, sys
from pathlib import Path

# options of SLURM's manual: a script may have no other
KNOWN = {"--job-name", "--array", "--cpus-per-task", "--mem", "--time", "--requeue"}
words = sys.argv[1:]
if words[0].startswith("--dependency="):
    assert words[0] == "--dependency=afterany:4711", words
    assert words[1] == "--wrap"
    subprocess.run(["sh", "-c", words[2]], check=True)
    sys.exit()
assert words[0] == "--parsable"
lines = Path(words[1]).read_text().splitlines()
assert lines[0].startswith("#!/"), "SLURM refuses a script without an interpreter"
told = [line.split()[1] for line in lines if line.startswith("#SBATCH")]
given = dict(one.partition("=")[::2] for one in told)
assert given.keys() <= KNOWN, given
first, last = map(int, given["--array"].split("-"))
for task in range(first, last + 1):
    env = os.environ | {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": str(last + 1 - first),
                        "SLURM_CPUS_PER_TASK": given["--cpus-per-task"]}
    subprocess.run(["sh", words[1]], env=env, stdout=sys.stderr)
print(4711)
"""


def command(folder: Path, name: str, program: str) -> None:
    """A command of the name that runs a Python program."""
    (folder / f"the_{name}.py").write_text(program, encoding="utf8")
    path = folder / name
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/the_{name}.py" "$@"\n', encoding="utf8")
    path.chmod(0o755)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / TABLE, encoding="utf8", newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def test_the_lines_of_the_page_make_the_table_of_one_run(folders, tmp_path: Path, gradaudit):
    script, submit = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf8"), re.MULTILINE | re.DOTALL)[:2]
    where = tmp_path / "bin"
    where.mkdir()
    command(where, "sbatch", SBATCH)
    command(where, "gradaudit", "from gradaudit.cli import main\nmain()\n")
    axes = '[axes]\ndefense = [[], [{name = "clip"}]]\nattack = [{name = "dager"}, {name = "blind"}]\n'
    sweep = tiny_models.write_sweep(tmp_path, folders["llama"], 1, axes)
    (tmp_path / "sweep.sh").write_text(script.replace("1-66", "1-2"), encoding="utf8")
    env = os.environ | {
        "PATH": f"{where}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "SCRATCH": str(tmp_path / "with a space"),
    }
    done = subprocess.run(
        ["sh", "-eu", "-c", submit], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((tmp_path / "with a space" / "out").iterdir())) == 5, "four points and the table"
    code, _, err = gradaudit("sweep", sweep, "--out", tmp_path / "one")
    assert code == 0, err
    assert rows_of(tmp_path / "with a space" / "out") == rows_of(tmp_path / "one")
