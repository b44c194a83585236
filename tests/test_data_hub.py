"""Hub data sets, by a stand-in for the datasets package."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from gradaudit.data.spec import DataSpec
from gradaudit.data.text import load_rows
from made_data import refusal

# --- the hub


def fake_hub(monkeypatch, **columns):
    """Put a stand-in for the datasets package in place; return the calls it got."""
    calls = []

    class Loaded:
        column_names = tuple(columns)
        features = {  # noqa: RUF012
            "text": SimpleNamespace(dtype="string"),
            "label": SimpleNamespace(names=["world", "sport", "trade"]),
            "stars": SimpleNamespace(dtype="int64"),
        }

        def __len__(self):
            return len(next(iter(columns.values())))

        def __getitem__(self, name):
            return columns[name]

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return Loaded()

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_hub_rows_and_their_declared_classes(monkeypatch, tmp_path):
    calls = fake_hub(monkeypatch, text=["a", "b"], label=[2, 0], stars=[5, 3])
    rows = load_rows(DataSpec(hub="news", config="en", split="test", label="label"), tmp_path)
    assert calls == [(("news", "en"), {"split": "test"})]
    assert rows.texts == ("a", "b")
    assert rows.labels == (2, 0), "a declared class keeps its number even when some classes do not occur"
    assert rows.classes == ("world", "sport", "trade")
    assert rows.where == "hub data set news (en), split test"
    stars = load_rows(DataSpec(hub="news", label="stars"), tmp_path)
    assert (stars.labels, stars.classes) == ((1, 0), ("3", "5"))


def test_a_hub_hash_follows_texts_and_labels(monkeypatch, tmp_path):
    hashes = set()
    for texts, labels in (
        (["a", "b"], [2, 0]),
        (["a", "c"], [2, 0]),
        (["a", "b"], [2, 1]),
        (["a", "b"], [2, 0]),
    ):
        fake_hub(monkeypatch, text=texts, label=labels)
        hashes.add(load_rows(DataSpec(hub="news", label="label"), tmp_path).sha256)
    assert len(hashes) == 3


def test_an_unlabeled_split_is_refused(monkeypatch, tmp_path):
    fake_hub(monkeypatch, text=["a", "b"], label=[0, -1])
    assert "row 1 (counted from 0) of hub data set news, split train has no label" in refusal(
        DataSpec(hub="news", label="label"), tmp_path
    )


def test_an_empty_split_and_a_wrong_column_are_refused(monkeypatch, tmp_path):
    fake_hub(monkeypatch, text=[])
    assert "holds no rows; choose another split" in refusal(DataSpec(hub="news"), tmp_path)
    fake_hub(monkeypatch, sentence=["a"])
    assert "it has 'sentence'" in refusal(DataSpec(hub="news"), tmp_path)


def test_an_unreachable_hub_is_one_sentence(monkeypatch, tmp_path):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach\n'news' on the Hub")

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    sentence = refusal(DataSpec(hub="news"), tmp_path)
    assert "hub data set news, split train cannot be loaded" in sentence
    assert "Couldn't reach 'news' on the Hub" in sentence
    assert "give a local file with path" in sentence


@pytest.mark.parametrize(
    ("package", "spec"),
    [("datasets", DataSpec(hub="news")), ("pyarrow", DataSpec(path="a.parquet"))],
)
def test_a_missing_package_names_the_extra(monkeypatch, tmp_path, package, spec):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, package, None)
    assert f"needs the package {package}; pip install 'gradaudit[data]'" in refusal(spec, tmp_path)
