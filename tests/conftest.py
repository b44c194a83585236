"""Fixtures of all tests: one core, and one tiny model of every family a session."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny_models
from gradaudit import cli
from gradaudit.models.transformers import TransformersModel

torch.set_num_threads(1)
Loader = Callable[..., TransformersModel]


def pytest_collection_finish() -> None:
    """Leave what the libraries hold out of every later collection of garbage: it is large and stays."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with config and tokenizer of every family."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: tiny_models.make_folder(family, root / family) for family in tiny_models.EVERY}


@pytest.fixture(scope="session")
def load(folders: dict[str, Path]) -> Loader:
    """Load a tiny model, the same object for the same arguments: tests must leave it as it was."""
    made: dict[tuple[object, ...], TransformersModel] = {}

    def loader(
        family: str, task: str = "classification", labels: int = 2, seed: int = 0, layers: int | None = None
    ) -> TransformersModel:
        key = (family, task, labels, seed, layers)
        if key not in made:
            made[key] = tiny_models.tiny(folders[family], task, labels, seed, layers)
        return made[key]

    return loader


@pytest.fixture
def gradaudit(monkeypatch, capsys):
    """Run the program in this process; returns (exit code, standard output, standard error)."""

    def runner(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gradaudit", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "400")
        monkeypatch.setattr(cli.err, "_width", 400)
        monkeypatch.setattr(cli.out, "_width", 400)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err + printed.out
        return int(ended.value.code or 0), printed.out, printed.err

    return runner
