"""Stops by hand: kills at random points, a disk that is full at every write in turn, two writers in one folder.

    cd tests && HF_HUB_OFFLINE=1 PYTHONPATH=. python -m fuzz.stops --kills 100 --write FILE

After each the same commands run again, and what they leave is compared with what undisturbed ones leave.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from fuzz.corpus import make_rows, toml
from fuzz.inputs import Input
from fuzz.program import Outcome, ended
from fuzz.tables import rows, stated
from gradaudit import demo
from gradaudit.case import parse_case

HANG = 300
_MOVES = ("seconds", "made", "when", "peak", "machine", "began")
"""Parts of names of what is another one in every run."""


@dataclass(frozen=True)
class Work:
    """Commands that write into one folder, "out", and may be run again.

    Args:
        commands: arguments, in order.
    """

    commands: tuple[tuple[str, ...], ...]


_SWEPT = ("sweep", "swept.toml", "--out", "out")
WORKS = {
    "run": Work((("run", "long.toml", "--out", "out"),)),
    "sweep": Work(((*_SWEPT,),)),
    "sweep --jobs 2": Work(((*_SWEPT, "--jobs", "2"),)),
    "sweep --shard": Work(((*_SWEPT, "--shard", "1/2"), (*_SWEPT, "--shard", "2/2"), ("report", "out"))),
    "fit": Work((("fit", "learned.toml", "--out", "out"),)),
    "demo": Work((("demo", "--out", "out"),)),
}


def make_works(root: Path) -> Path:
    """Write a model, rows and the cases of the works into a folder, and let `demo` run tiny cases."""
    make_rows(root)
    model = f"random:{root / 'bert'}"
    data = {"path": str(root / "rows.csv"), "label": "label", "batch_size": 1, "batches": 4}
    tag: dict[str, Any] = {"name": "tag", "steps": 12}
    case = {"model": model, "data": data, "attack": tag}
    learned = {**case, "attack": {"name": "lti", "epochs": 3, "width": 16}}
    learned["public"] = {"path": str(root / "rows.csv"), "rows": 6, "label": "label"}
    axes = {"client.dropout": [True, False], "attack": [tag, {"name": "blind"}]}
    swept = {"model": model, "data": data | {"batches": 2}, "axes": axes}
    for name, held in {"long": case, "learned": learned, "swept": swept}.items():
        (root / f"{name}.toml").write_bytes(toml(held))
    settings = {demo.OFF: {"dropout": False}, demo.PRACTICAL: {"dropout": True}}
    tiny = [parse_case({**case, "data": data | {"batches": 1, "batch_size": 2}, "name": name, "client": client})
            for name, client in settings.items()]  # fmt: skip
    demo.cases = lambda: tiny
    return root


def run(work: Work, folder: Path) -> Outcome:
    """Run a work's commands in this process until one fails."""
    said = ""
    for arguments in work.commands:
        outcome = ended(Input("stop", arguments), folder)
        said += outcome.said
        if outcome.code:
            return Outcome(outcome.code, said)
    return Outcome(0, said)


def left(folder: Path) -> dict[str, Any]:
    """Return what a work left in its folder, without what is another in every run."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name, content = str(path.relative_to(folder)), path.read_bytes()
        if path.suffix == ".jsonl":
            found[name] = [_steady(json.loads(line)) for line in content.splitlines()]
        elif path.suffix == ".json":
            found[name] = _steady(json.loads(content))
        elif path.suffix == ".csv":
            found[name] = [_steady(row) for row in csv.DictReader(io.StringIO(content.decode()))]
        elif path.suffix == ".html":
            found[name] = "a page" if content.rstrip().endswith(b"</html>") else "half a page"
        elif path.name != ".lock":
            found[name] = hashlib.sha256(content).hexdigest()
    return found


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _steady(v) for k, v in value.items() if not any(part in str(k) for part in _MOVES)}
    return [_steady(one) for one in value] if isinstance(value, list) else value


def drafted(path: Path) -> bool:
    """Return whether a file is one that was being written, by us or by safetensors, when its program was killed."""
    return any(part.startswith((".new-", ".tmp")) for part in path.parts)


def differs(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Return which file is not as it was to be; drafts of killed programs do not count."""
    mine = {name: held for name, held in found.items() if not drafted(Path(name))}
    wrong = sorted(name for name in set(mine) | set(wanted) if mine.get(name) != wanted.get(name))
    return wrong[0] if wrong else ""


@contextmanager
def full_at(number: int | None) -> Iterator[Callable[[], int]]:
    """Let one write find the disk full, in its middle; yields how many writes there were.

    Args:
        number: which, from 0; None for none.
    """
    count = 0
    write, text, content = os.write, Path.write_text, Path.write_bytes
    mkdir, tensors = Path.mkdir, safetensors.torch.serialize_file
    ours = os.getpid()

    def refused() -> bool:
        nonlocal count
        count += 1
        return count - 1 == number and os.getpid() == ours

    def full() -> OSError:
        return OSError(28, "No space left on device")

    def os_write(handle: int, data: bytes) -> int:
        if refused():
            write(handle, data[: len(data) // 2])
            raise full()
        return write(handle, data)

    def write_text(self: Path, data: str, **how: Any) -> int:
        if refused():
            text(self, data[: len(data) // 2], **how)
            raise full()
        return text(self, data, **how)

    def write_bytes(self: Path, data: bytes) -> int:
        if refused():
            content(self, data[: len(data) // 2])
            raise full()
        return content(self, data)

    def make(self: Path, *args: Any, **how: Any) -> None:
        if not self.exists() and refused():
            raise full()
        mkdir(self, *args, **how)

    def serialize(held: Any, path: Any, metadata: Any = None) -> None:
        tensors(held, path, metadata)
        if refused():
            whole = content_of(Path(path))
            content(Path(path), whole[: len(whole) // 2])
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def content_of(path: Path) -> bytes:
        return path.read_bytes()

    patched = [(os, "write", os_write), (Path, "write_text", write_text), (Path, "write_bytes", write_bytes),
               (Path, "mkdir", make), (safetensors.torch, "serialize_file", serialize)]  # fmt: skip
    before = [(where, name, getattr(where, name)) for where, name, _ in patched]
    for where, name, new in patched:
        setattr(where, name, new)
    try:
        yield lambda: count
    finally:
        for where, name, old in before:
            setattr(where, name, old)


@contextmanager
def fresh(root: Path) -> Iterator[Path]:
    """Give a copy of the corpus."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "it"
        shutil.copytree(root, folder)
        yield folder


def disk_full(work: Work, root: Path, wanted: dict[str, Any]) -> Counter[str]:
    """Let every write of a work find the disk full, one after the other, and run it again each time."""
    with fresh(root) as folder, full_at(None) as count:
        run(work, folder)
    said: Counter[str] = Counter()
    for number in range(count()):
        with fresh(root) as folder:
            with full_at(number):
                first = run(work, folder)
            said["writes"] += 1
            said["went on"] += first.code == 0
            said["a sentence"] += first.code == 2 and not first.fault(Input("stop", ()))
            again = run(work, folder)
            problem = again.fault(Input("stop", (), {}, (0,))) or differs(left(folder / "out"), wanted)
            fault = first.fault(Input("stop", ()))
            if problem or fault:
                said[f"write {number}: {fault or problem}"] += 1
    return said


def start(work: Work, folder: Path, said: int) -> int:
    """Run a work in a child with a group of its own and return its process id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setsid()
        outcome = run(work, folder)
        os.write(said, outcome.said.encode("utf8", errors="replace"))
        code = outcome.code
    finally:
        os._exit(code)


def waited(child: int) -> int:
    """Return the exit code of a child, -1 for one that was killed or takes longer than anything."""
    began = time.perf_counter()
    while time.perf_counter() - began < HANG:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def kills(work: Work, root: Path, wanted: dict[str, Any], times: int, rng: random.Random) -> Counter[str]:
    """Kill a work and all its processes at random points, up to three times, and run it to its end."""
    with fresh(root) as folder, tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        waited(start(work, folder, output.fileno()))
        usual = time.perf_counter() - began
    said: Counter[str] = Counter()
    while said["kills"] < times:
        with fresh(root) as folder, tempfile.TemporaryFile() as output:
            for _ in range(rng.randint(1, min(3, times - said["kills"]))):
                child = start(work, folder, output.fileno())
                time.sleep(rng.uniform(0, usual))
                try:
                    os.killpg(child, signal.SIGKILL)
                except ProcessLookupError:
                    os.kill(child, signal.SIGKILL)  # it has no group yet
                _, status = os.waitpid(child, 0)
                said["kills"] += 1
                said["in the middle"] += os.WIFSIGNALED(status)
            said["runs again"] += 1
            code = waited(start(work, folder, output.fileno()))
            problem = f"exit code {code}" if code else differs(left(folder / "out"), wanted)
            said["drafts left"] += sum(drafted(path.relative_to(folder)) for path in (folder / "out").rglob("*"))
            if problem:
                said[problem] += 1
    return said


def two_writers(work: Work, root: Path, wanted: dict[str, Any], times: int, rng: random.Random) -> Counter[str]:
    """Start a work twice in one folder, the second a little later."""
    said: Counter[str] = Counter()
    for _ in range(times):
        with fresh(root) as folder, tempfile.TemporaryFile() as output:
            first = start(work, folder, output.fileno())
            time.sleep(rng.uniform(0, 0.3))
            codes = sorted((waited(start(work, folder, output.fileno())), waited(first)))
            output.seek(0)
            text = output.read().decode("utf8", errors="replace")
            problem = "" if codes in ([0, 0], [0, 2]) else f"exit codes {codes}"
            problem = problem or ("traceback" if "Traceback" in text else differs(left(folder / "out"), wanted))
            said["pairs"] += 1
            said["one refused"] += codes == [0, 2]
            if problem:
                said[problem] += 1
    return said


def _row(name: str, counts: Counter[str], columns: tuple[str, ...]) -> tuple[object, ...]:
    wrong = ", ".join(f"{n} {what}" for what, n in counts.items() if what not in columns) or "0"
    return (name, *(counts[column] for column in columns), wrong)


def main() -> None:
    """Stop everything and write the tables."""
    told = argparse.ArgumentParser(description=__doc__)
    told.add_argument("--kills", type=int, default=100, help="in all")
    told.add_argument("--pairs", type=int, default=4, help="of writers, each work")
    told.add_argument("--works", nargs="*", default=list(WORKS))
    told.add_argument("--seed", type=int, default=0)
    told.add_argument("--write", type=Path)
    given = told.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(given.seed)
    parts: dict[str, list[tuple[object, ...]]] = {"kills": [], "full": [], "two": []}
    columns = {
        "kills": ("kills", "in the middle", "runs again", "drafts left"),
        "full": ("writes", "a sentence", "went on"),
        "two": ("pairs", "one refused"),
    }
    with tempfile.TemporaryDirectory() as where:
        root = make_works(Path(where) / "corpus")
        for name in given.works:
            work = WORKS[name]
            with fresh(root) as folder:
                outcome = run(work, folder)
                assert not outcome.code, outcome.said
                wanted = left(folder / "out")
            share = -(-given.kills // len(given.works))
            found = {
                "kills": kills(work, root, wanted, share, rng),
                "two": two_writers(work, root, wanted, given.pairs, rng),
            }
            if "--jobs" not in work.commands[0]:  # its writers are other processes
                found["full"] = disk_full(work, root, wanted)
            for part, counts in found.items():
                parts[part].append(_row(name, counts, columns[part]))
                print(part, *parts[part][-1], flush=True)
    lines = ["# Reliability: stops", "", f"{stated()}."]
    for part, title in (("kills", "killed"), ("full", "disk full"), ("two", "two writers")):
        lines += ["", *rows((title, *columns[part], "wrong"), parts[part])]
    text = "\n".join(lines)
    print(text)
    if given.write is not None:
        given.write.write_text(text + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
