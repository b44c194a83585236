"""What the command line answers without torch, and what its help says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files

import pytest
import torch
import typer.main

from gradaudit import catalog, cli, machine
from gradaudit.cli import app

_RUN = """
import sys
from gradaudit.cli import main
sys.argv = ["gradaudit", *{words!r}]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def light(*words: str) -> str:
    done = subprocess.run([sys.executable, "-c", _RUN.format(words=words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lists_and_details_need_no_torch_and_say_what_the_catalog_says():
    assert json.loads(light("list", "attacks", "--json")) == catalog.listing("attacks")
    assert json.loads(light("show", "attack", "tag", "--json")) == json.loads(
        json.dumps(catalog.details("attack", "tag"))
    )
    assert light("show", "case", "example") == catalog.EXAMPLE
    light("run", "--help")


def test_the_shipped_catalog_is_the_catalog():
    held = json.loads(files("gradaudit").joinpath("data/catalog.json").read_text(encoding="utf8"))
    made = json.loads(json.dumps(catalog.shipped()))
    assert held == made, "run: python -m gradaudit.catalog > src/gradaudit/data/catalog.json"


def test_help_says_what_every_argument_is():
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for param in command.params:
            assert param.help, f"{name} {param.name}"


def test_the_shell_can_complete(monkeypatch):
    told = os.environ | {"_GRADAUDIT_COMPLETE": "complete_bash", "COMP_WORDS": "gradaudit sw", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "from gradaudit.cli import app; app(prog_name='gradaudit')"]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "sweep"


def test_a_mistyped_command_is_answered_once(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gradaudit", "runn"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("Did you mean 'run'?")) == (2, 1)


def test_a_bug_is_told_from_an_inconclusive_run(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr("gradaudit.case.load_case", broken)
    monkeypatch.setattr(sys, "argv", ["gradaudit", "run", "case.toml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, "this is a bug" in capsys.readouterr().err) == (4, True)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_chosen(monkeypatch, threads: int):
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    try:
        machine.choose_threads(None)
        assert torch.get_num_threads() == before
        machine.choose_threads(threads)
        assert torch.get_num_threads() == threads
        assert os.environ["OMP_NUM_THREADS"] == str(threads)
    finally:
        torch.set_num_threads(before)


_PYTHON = """
import os, sys, types
import gradaudit
for place in ("api.calls", "bundles.capture"):  # without what they import
    sys.modules["gradaudit." + place] = types.SimpleNamespace(run=0, attack=0, capture=0)
for name in ("capture", "run", "attack"):
    getattr(gradaudit, name)
    print(os.environ.pop("OMP_WAIT_POLICY", None))
"""


def test_from_python_what_attacks_lets_threads_sleep_and_what_records_changes_nothing():
    told = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    look = subprocess.run([sys.executable, "-c", _PYTHON], env=told, capture_output=True, text=True, check=False)
    assert look.stdout.split() == ["None", "PASSIVE", "PASSIVE"], look.stderr


@pytest.mark.parametrize(("load", "policy", "one"), [(99.0, "", True), (99.0, "passive", False), (0.1, "", False)])
def test_from_python_one_thread_computes_where_threads_spin_on_a_busy_machine(monkeypatch, load, policy, one):
    """Of an attack of 13 s it made 145 s, at a load of 8 on two cores."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with machine.sparing_threads():
            assert torch.get_num_threads() == (1 if one else 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("own", [None, "ACTIVE"])
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(own: str | None):
    """On a busy machine threads that spin tripled the time of an attack; OpenMP reads this once, as torch is loaded."""
    told = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    told |= {} if own is None else {"OMP_WAIT_POLICY": own}
    look = (
        "import os, sys; from gradaudit import cli; cli.choose_threads(None); "
        "sys.exit(f\"{os.environ['OMP_WAIT_POLICY']} {'torch' in sys.modules}\")"
    )
    done = subprocess.run([sys.executable, "-c", look], env=told, capture_output=True, text=True, check=False)
    assert done.stderr.split() == [own or "PASSIVE", "False"]
