"""The long run: thousands of broken inputs, each in a forked child with limits of time and memory, and their counts.

    cd tests && HF_HUB_OFFLINE=1 PYTHONPATH=. python -m fuzz.long --write ../benchmarks/results/reliability.md

Faults are kept in the folder that --faults names, a file each, to be looked at and mended. With --keep, a run that was
stopped goes on after the kinds that it finished.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import signal
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.corpus import make_corpus
from fuzz.inputs import Input, every_kind
from fuzz.program import Outcome, ended, placed
from fuzz.tables import rows, stated
from gradaudit.attacks.auto import Auto

HANG, MEMORY = 20, 2 << 30
"""Seconds that an input may take, and bytes beyond those of the program itself."""
BUDGET = 4.0
"""Seconds a batch in place of the default attack's 120: a good case that names no attack would run so long, and may."""


@dataclass
class Count:
    """What came of the inputs of one kind."""

    tried: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    memory: int = 0


def in_child(one: Input, root: Path) -> tuple[str, int, float, int, str]:
    """Run an input in a forked child; returns what is wrong, exit code, seconds, MiB that it added, and output."""
    # what hypothesis keeps of large inputs lets this program grow: the limit is beyond what it takes now
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
    with placed(one, root) as folder, tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        child = os.fork()
        if not child:
            _be_child(one, folder, said.fileno(), limit)
        own = peak = _resident(child)
        status = None
        while status is None:
            done, code = os.waitpid(child, os.WNOHANG)
            if done:
                status = code
                break
            peak = max(peak, _resident(child))
            if time.perf_counter() - began > HANG:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        said.seek(0)
        text = said.read().decode("utf8", errors="replace")
        more = max(0, peak - own) >> 20
        if status is None:
            return f"over {HANG} s", -1, seconds, more, text
        if os.WIFSIGNALED(status):
            return f"signal {os.WTERMSIG(status)}", -1, seconds, more, text
        code = os.WEXITSTATUS(status)
        fault = Outcome(code, text).fault(one)
        return fault or ("over 2 GB" if "not enough memory" in text else ""), code, seconds, more, text


def _resident(process: int) -> int:
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * resource.getpagesize()


def _be_child(one: Input, folder: Path, said: int, limit: int) -> None:
    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        outcome = ended(one, folder)
        os.write(said, outcome.said.encode("utf8", errors="replace"))
        code = outcome.code
    except BaseException as error:
        os.write(said, f"Traceback: {type(error).__name__}: {error}".encode("utf8", errors="replace"))
    finally:
        os._exit(code)


def run_kind(kind: str, root: Path, each: int, number: int, faults: Path | None) -> Count:
    """Try so many inputs of one kind."""
    count = Count()

    @seed(number)
    @settings(max_examples=each, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(every_kind(root)[kind])
    def tried(one: Input) -> None:
        fault, code, seconds, more, text = in_child(one, root)
        count.tried += 1
        count.codes[code] += 1
        count.seconds.append(seconds)
        count.memory = max(count.memory, more)
        if fault:
            count.faults[fault] += 1
            if faults is not None:
                shown = "\n".join(f"--- {path}\n{content[:3000]!r}" for path, content in one.files.items())
                last = f"{fault}\n{shlex.join(one.arguments)}\n{shown}\n--- said\n{text[-6000:]}\n"
                (faults / f"{kind}-{count.tried}.txt").write_text(last, encoding="utf8", errors="replace")

    tried()
    return count


def table(counts: dict[str, Count]) -> str:
    """Return the page of results."""
    head = [
        "# Reliability: broken inputs of every kind",
        "",
        f"{stated()}; the machine was shared, so that seconds are upper bounds.",
        "",
        "Each input is a good one with something wrong in it, run by the whole program in a child with a limit of "
        f"{HANG} s and {MEMORY >> 30} GiB beyond what the program takes before it reads anything.",
        "A sentence: neither a traceback nor silence. MiB: the largest that an input added. A case that names no "
        f"attack gets the default one with {BUDGET:g} s a batch in place of 120.",
        "",
    ]
    columns = "broken, tried, in a sentence, exit 0, 1, 2, 3, other, faults, seconds: median, most, MiB"
    whole = Count()
    cells = [_row(kind, one) for kind, one in counts.items()]
    for one in counts.values():
        whole.tried += one.tried
        whole.codes += one.codes
        whole.faults += one.faults
        whole.seconds += one.seconds
        whole.memory = max(whole.memory, one.memory)
    return "\n".join([*head, *rows(tuple(columns.split(", ")), [*cells, _row("all", whole)]), ""])


def _row(kind: str, one: Count) -> tuple[object, ...]:
    other = sum(n for code, n in one.codes.items() if code not in (0, 1, 2, 3))
    wrong = sum(one.faults.values())
    said = ", ".join(f"{n} {name}" for name, n in one.faults.most_common()) or "0"
    codes = [one.codes[code] for code in (0, 1, 2, 3)]
    seconds = f"{statistics.median(one.seconds):.2f}", f"{max(one.seconds):.1f}"
    return (kind, one.tried, one.tried - wrong, *codes, other, said, *seconds, one.memory)


def read_kept(path: Path, each: int, number: int) -> dict[str, Count]:
    """Return the counts by kind that an earlier run of as many inputs from the same seed kept."""
    if not path.is_file():
        return {}
    held = json.loads(path.read_text(encoding="utf8"))
    if held["of"] != [each, number]:
        raise SystemExit(f"{path} holds counts of {held['of']}, each and seed; name another file.")
    return {kind: Count(**one | {"codes": Counter({int(code): n for code, n in one["codes"].items()}),
                                 "faults": Counter(one["faults"])})
            for kind, one in held["counts"].items()}  # fmt: skip


def write_kept(path: Path, each: int, number: int, counts: dict[str, Count]) -> None:
    """Keep the counts of the kinds that are finished."""
    held = {"of": [each, number], "counts": {kind: vars(one) for kind, one in counts.items()}}
    path.write_text(json.dumps(held), encoding="utf8")


def main() -> None:
    """Run the fuzz and write its table."""
    told = argparse.ArgumentParser(description=__doc__)
    told.add_argument("--each", type=int, default=800, help="inputs of each kind")
    told.add_argument("--kinds", nargs="*", help="some kinds alone")
    told.add_argument("--seed", type=int, default=0)
    told.add_argument("--faults", type=Path, help="folder for what went wrong")
    told.add_argument("--keep", type=Path, help="file of the counts so far")
    told.add_argument("--write", type=Path, help="file of the table")
    given_ = told.parse_args()
    torch.set_num_threads(1)
    next(one for one in fields(Auto) if one.name == "budget").default = BUDGET  # before anything builds one
    if given_.faults is not None:
        given_.faults.mkdir(parents=True, exist_ok=True)
    kept = read_kept(given_.keep, given_.each, given_.seed) if given_.keep is not None else {}
    counts: dict[str, Count] = {}
    with tempfile.TemporaryDirectory() as where:
        root = make_corpus(Path(where) / "corpus")
        for kind in given_.kinds or every_kind(root):
            counts[kind] = kept.get(kind) or run_kind(kind, root, given_.each, given_.seed, given_.faults)
            print(*_row(kind, counts[kind]), flush=True)
            if given_.keep is not None:
                write_kept(given_.keep, given_.each, given_.seed, kept | counts)
            if given_.write is not None:
                given_.write.write_text(table(counts), encoding="utf8")


if __name__ == "__main__":
    main()
