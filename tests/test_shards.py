"""A sweep in shards or on a cluster gives what one run gives, and what is missing is said."""

from __future__ import annotations

import csv
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny_models
from gradaudit.audit import run as audit
from gradaudit.errors import BadInputError
from gradaudit.sweeps.result import TABLE
from gradaudit.sweeps.shards import POINT, Shard, merge, shard_groups
from gradaudit.sweeps.sweep import load_sweep


@pytest.fixture
def sweep(folders, tmp_path: Path) -> Path:
    """Two attacks on four clients, one of whom cannot be attacked by one of them."""
    return tiny_models.write_sweep(
        tmp_path,
        folders["llama"],
        1,
        '[axes]\ndefense = [[], [{name = "gaussian", sigma = 10.0}], [{name = "sign"}], [{name = "clip"}]]\n'
        'attack = [{name = "dager"}, {name = "blind"}]\n',
    )


def rows_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / TABLE, encoding="utf8", newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def test_three_shards_give_the_table_of_one_run(sweep: Path, tmp_path: Path, gradaudit, monkeypatch):
    code, whole, err = gradaudit("sweep", sweep, "--out", tmp_path / "one")
    assert code == 0, err
    for number in (3, 1, 2):
        code, out, err = gradaudit("sweep", sweep, "--out", tmp_path / "many", "--shard", f"{number}/3")
        assert (code, out) == (0, ""), err
        assert f"gradaudit report {tmp_path / 'many'}" in err
        assert not (tmp_path / "many" / TABLE).exists()
    monkeypatch.setattr(audit, "audit_batch", lambda *_: pytest.fail("attacked again"))
    code, merged, err = gradaudit("report", tmp_path / "many")
    assert code == 0, err
    assert rows_of(tmp_path / "many") == rows_of(tmp_path / "one")
    assert len(rows_of(tmp_path / "one")) == 8
    assert any("no counter" in row["error"] for row in rows_of(tmp_path / "many")), "what is not supported is kept"
    assert [line.split()[:2] for line in merged.splitlines()[:12]] == [
        line.split()[:2] for line in whole.splitlines()[:12]
    ]


def test_shards_part_the_points_and_keep_a_client_together(sweep: Path):
    asked = load_sweep(sweep)
    shards = [shard_groups(asked, Shard(k, 3)) for k in (1, 2, 3)]
    numbers = sorted(n for groups in shards for group in groups for n, _ in group)
    assert numbers == list(range(8))
    assert [[[n for n, _ in group] for group in groups] for groups in shards] == [
        [[0, 1], [6, 7]], [[2, 3]], [[4, 5]]
    ]  # fmt: skip


def test_what_is_missing_or_does_not_belong_is_said(sweep: Path, tmp_path: Path, gradaudit):
    out = tmp_path / "out"
    code, _, err = gradaudit("sweep", sweep, "--out", out, "--shard", "2/4", "--set", "data.batches=1")
    assert code == 0, err
    code, _, err = gradaudit("report", out)
    assert code == 3
    assert "6 points are not there yet" in err
    assert len(rows_of(out)) == 2
    code, _, err = gradaudit("sweep", sweep, "--out", tmp_path / "none", "--shard", "9/9")
    assert code == 0
    assert "0 of 8 points" in err
    told = next(out.glob(f"*/{POINT}"))
    told.write_text(told.read_text().replace('"number":', '"numbre":'))
    with pytest.raises(BadInputError, match="is not a point of a sweep"):
        merge(out)


def test_points_of_two_sweeps_are_not_mixed(sweep: Path, tmp_path: Path, gradaudit):
    for more in ("1", "2"):
        told = ("--shard", "4/4", "--set", f"data.batches={more}")
        assert gradaudit("sweep", sweep, "--out", tmp_path / "out", *told)[0] == 0
    code, _, err = gradaudit("report", tmp_path / "out")
    assert code == 2
    assert "points of two sweeps" in err


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "1/0", "a/b", "-1/3", "1/3/5"])
def test_a_shard_that_is_none_is_refused(text):
    with pytest.raises(BadInputError, match="--shard takes K/N"):
        Shard.parse(text)


REAL = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'gradaudit[ray]'"
)


@REAL
def test_a_cluster_of_two_workers_one_of_them_killed_gives_the_table_of_one_run(sweep: Path, tmp_path: Path):
    """The real Ray; the worker of one client kills itself once, as the machine would for want of memory."""
    killed = tmp_path / "killed"
    program = f"""
import os
from pathlib import Path
from gradaudit.sweeps import cluster
real = cluster._task
def once(points, *more):
    if points[0].case.defense and points[0].case.defense[0]["name"] == "sign" and not Path({str(killed)!r}).exists():
        Path({str(killed)!r}).touch()
        os.kill(os.getpid(), 9)
    return real(points, *more)
cluster._task = once
from gradaudit import cli
cli.main()
"""
    (tmp_path / "program.py").write_text(program, encoding="utf8")
    # "local" is a cluster of its own, whatever address the machine has for another
    told = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "RAY_ADDRESS": "127.0.0.1:9"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "program.py"), "sweep", str(sweep), *arguments]
        return subprocess.run(command, env=os.environ | told, capture_output=True, text=True, check=False)

    first = run("--out", str(tmp_path / "many"), "--ray", "local")
    assert first.returncode == 0, first.stderr[-3000:]
    assert killed.exists()
    lost = [row for row in rows_of(tmp_path / "many") if "worker was lost" in row["error"]]
    assert {row["defense"] for row in lost} == {"sign"}
    assert len(lost) == 2
    assert run("--out", str(tmp_path / "many"), "--ray", "local").returncode == 0
    assert run("--out", str(tmp_path / "one")).returncode == 0
    assert rows_of(tmp_path / "many") == rows_of(tmp_path / "one")


@REAL
def test_two_machines_of_a_cluster_that_was_there_before_give_the_table_of_one_run(sweep: Path, tmp_path: Path):
    """`ray start` twice, with one core each, in a folder of their own: others on this machine must not find them."""
    program = f"""
from pathlib import Path
import ray
from gradaudit.sweeps import cluster
real = cluster._task
def noted(*given):
    Path({str(tmp_path)!r}, "node-" + ray.get_runtime_context().get_node_id()).touch()
    return real(*given)
cluster._task = noted
from gradaudit import cli
cli.main()
"""
    (tmp_path / "program.py").write_text(program, encoding="utf8")
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    short = tempfile.mkdtemp(prefix="ray")  # its sockets' paths have 107 characters at most
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1"]
    starts = [
        [*ray, "--head", f"--port={address.partition(':')[2]}", "--include-dashboard=false", f"--temp-dir={short}"],
        [*ray, f"--address={address}"],
    ]
    machines = []
    try:
        for start in starts:
            machines.append(subprocess.Popen(start, env=env, stdout=subprocess.PIPE, text=True))
            said = machines[-1].stdout
            assert said is not None
            assert any("Ray runtime started" in line for line in said), "the machine did not start"
        command = [sys.executable, str(tmp_path / "program.py"), "sweep", str(sweep)]
        for more in (["--out", str(tmp_path / "many"), "--ray", address], ["--out", str(tmp_path / "one")]):
            done = subprocess.run([*command, *more], env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
    finally:
        for machine in reversed(machines):
            machine.terminate()
            machine.communicate(timeout=60)
        shutil.rmtree(short)
    assert rows_of(tmp_path / "many") == rows_of(tmp_path / "one")
    assert len(list(tmp_path.glob("node-*"))) == 2


@REAL
def test_a_cluster_that_is_not_there_is_said_at_once(sweep: Path, tmp_path: Path, gradaudit):
    code, _, err = gradaudit("sweep", sweep, "--out", tmp_path / "out", "--ray", "127.0.0.1:9")
    assert code == 2
    assert "no Ray cluster answers at '127.0.0.1:9'" in err


def test_another_program_s_port_is_said(sweep: Path, tmp_path: Path, gradaudit, monkeypatch):
    """Ray (2.55) leaves the program with 15, behind three minutes, where something else listens."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=lambda *_, **__: sys.exit(15)))
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        code, _, err = gradaudit("sweep", sweep, "--out", tmp_path / "out", "--ray", address)
    assert code == 2
    assert f"no Ray cluster answers at '{address}' (another program's port?)" in err


def test_a_cluster_and_other_ways_to_share_are_not_mixed(sweep: Path, gradaudit):
    code, _, err = gradaudit("sweep", sweep, "--ray", "local", "--jobs", "2")
    assert code == 2
    assert "leave --shard and --jobs away" in err
