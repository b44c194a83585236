"""A sweep in shards: together they give what one run gives, and what is missing is said."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import tiny_models
from gradaudit.audit import run as audit
from gradaudit.errors import BadInputError
from gradaudit.sweeps.shards import POINT, Shard, merge, shard_groups
from gradaudit.sweeps.sweep import TABLE, load_sweep


@pytest.fixture
def sweep(folders, tmp_path: Path) -> Path:
    """Two attacks on four clients, one of whom cannot be attacked by one of them."""
    rows = tiny_models.sentences([4, 3, 5, 4, 3, 5], seed=3, distinct=False)
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"{t},{i % 2}\n" for i, t in enumerate(rows)))
    path = tmp_path / "sweep.toml"
    path.write_text(
        f'model = "random:{folders["llama"]}"\n'
        '[data]\npath = "rows.csv"\nlabel = "label"\nbatches = 1\n'
        '[axes]\ndefense = [[], [{name = "gaussian", sigma = 10.0}], [{name = "sign"}], [{name = "clip"}]]\n'
        'attack = [{name = "dager"}, {name = "blind"}]\n'
    )
    return path


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
