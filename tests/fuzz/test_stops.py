"""A disk that is full at each write of a run in turn: a sentence, and the same command brings all that is missing."""

from __future__ import annotations

import pytest

from fuzz.corpus import CASE, toml
from fuzz.stops import WORKS, disk_full, fresh, left, make_works, run


@pytest.mark.parametrize("name", ["run", "fit"])
def test_a_disk_that_is_full_at_any_write_loses_nothing(tmp_path_factory, monkeypatch, name: str):
    monkeypatch.setattr("gradaudit.demo.cases", None)  # put back after `make_works`
    root = make_works(tmp_path_factory.mktemp("stops") / "corpus")
    (root / "long.toml").write_bytes(toml({k: v for k, v in CASE.items() if k != "metrics"}))  # a quick one
    with fresh(root) as folder:
        assert run(WORKS[name], folder).code == 0
        wanted = left(folder / "out")
    counts = disk_full(WORKS[name], root, wanted)
    assert counts["writes"] > 4
    assert set(counts) == {"writes", "a sentence", "went on"}, dict(counts)
