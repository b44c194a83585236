"""Data sets by name: read from a local copy in its own layout, else from the hub; the machine is not in a case's id."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import get_args

import pytest

from gradaudit.case import parse_case
from gradaudit.data.draw import draw
from gradaudit.data.images import load_images
from gradaudit.data.named import NAMED, SetName
from gradaudit.data.spec import DataSpec, SourceSpec
from gradaudit.data.text import TextRows as Rows
from gradaudit.data.text import load_rows
from gradaudit.errors import BadInputError
from made_data import refusal

COLA = 'gj04\t1\t\tThe cat sat.\ngj04\t0\t*\tSat cat "the.\nbc01\t1\t\tIt rained.\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of local copies, and an empty cache."""
    made = tmp_path / "copies"
    made.mkdir()
    monkeypatch.setenv("GRADAUDIT_DATA", str(made))
    monkeypatch.setenv("GRADAUDIT_CACHE", str(tmp_path / "cache"))
    return made


def put(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf8")
    return file


def named(name: str, split: str = "train") -> Rows:
    return load_rows(SourceSpec.model_validate({"source": name, "split": split}), Path())


def test_every_name_is_known_and_has_a_training_split():
    assert get_args(SetName) == tuple(NAMED)
    assert all("train" in known.files for known in NAMED.values())


def test_a_named_set_gives_what_its_path_and_columns_give(folder: Path):
    file = put(folder, "cola/in_domain_train.tsv", COLA)
    by_path = DataSpec(path=str(file), header=False, text=3, label=1, shuffle_seed=101, batches=2)
    by_name = DataSpec(source="cola", shuffle_seed=101, batches=2)
    one, other = load_rows(by_path, Path()), load_rows(by_name, Path())
    assert (one.texts, one.labels, one.classes, one.sha256) == (other.texts, other.labels, other.classes, other.sha256)
    assert other.labels == (1, 0, 1)
    assert draw(by_path, one) == draw(by_name, other)
    assert str(folder) not in other.where
    put(folder, "sst2/train_10k.tsv", "sentence\tlabel\ngood \t1\nbad \t0\n")
    assert named("sst2").texts == ("good ", "bad ")
    assert named("sst2").labels == (1, 0)


def test_a_split_has_its_own_file_and_the_set_no_other_splits(folder: Path):
    put(folder, "cola/in_domain_train.tsv", COLA)
    put(folder, "cola/in_domain_dev.tsv", "gj04\t1\t\tA test.\n")
    put(folder, "wikitext2/wiki.test.tokens", " \n = A = \n")
    assert named("cola", "validation").texts == ("A test.",)
    assert named("wikitext-2", "test").texts == (" ", " = A = ")
    assert named("wikitext-2", "test").labels is None
    with pytest.raises(ValueError, match="has no split 'dev'; set split to train or validation"):
        named("cola", "dev")


def test_two_files_are_two_classes_in_their_order(folder: Path):
    put(folder, "rotten_tomatoes/rt-polarity.neg", "so  dull .\n\nno\tfun\n")
    with pytest.raises(BadInputError, match=r"rt-polarity\.pos is missing beside"):
        named("rotten-tomatoes")
    put(folder, "rotten_tomatoes/rt-polarity.pos", "a joy\n")
    rows = named("rotten-tomatoes")
    assert rows.texts == ("so dull .", "no fun", "a joy")
    assert rows.labels == (0, 0, 1)
    assert rows.sha256 == hashlib.sha256(b"0\tso dull .\n0\tno fun\n1\ta joy\n").hexdigest()


def test_images_have_names_too(folder: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    encoded = []
    for gray in (10, 200):
        out = io.BytesIO()
        image.new("RGB", (4, 4), (gray, 0, 0)).save(out, format="PNG")
        encoded.append(out.getvalue())
    (folder / "cifar10_jpeg").mkdir()
    file = folder / "cifar10_jpeg" / "test.parquet"
    parquet.write_table(pyarrow.table({"image": encoded, "label": [3, 7]}), file)
    rows = load_images(SourceSpec(source="cifar10", split="test"), Path())
    assert rows.sha256 == load_images(SourceSpec(path=str(file)), Path()).sha256
    assert rows.classes == ("3", "7")
    with pytest.raises(BadInputError, match="has images"):
        named("cifar10")
    with pytest.raises(BadInputError, match="has texts"):
        load_images(SourceSpec(source="cola"), Path())


def test_the_cache_is_second_and_a_wrong_folder_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path / "cache" / "data", "cola/in_domain_train.tsv", COLA)
    assert len(named("cola")) == 3
    put(folder, "cola/in_domain_train.tsv", "gj04\t1\t\tFirst.\n")
    assert named("cola").texts == ("First.",)
    monkeypatch.setenv("GRADAUDIT_DATA", str(tmp_path / "nowhere"))
    assert "GRADAUDIT_DATA is" in refusal(DataSpec(source="cola"), Path())


def test_the_hub_is_last_and_without_it_one_sentence_says_both_ways(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def hub_table(hub: str, spec: SourceSpec, *columns: str | None):
        asked.append((hub, spec.config, spec.split, *columns))
        raise BadInputError("no network")

    monkeypatch.setattr("gradaudit.data.files.hub_table", hub_table)
    said = refusal(DataSpec(source="cola", split="validation"), Path())
    assert asked == [("nyu-mll/glue", "cola", "validation", "label", None)]
    assert "set GRADAUDIT_DATA to a folder that holds cola/in_domain_dev.tsv, or install gradaudit[data]" in said


def test_the_id_of_a_case_is_made_of_the_name_not_of_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = {"attack": {"name": "dager"}, "data": {"source": "cola"}}
    first = parse_case(data).content_hash()
    monkeypatch.setenv("GRADAUDIT_DATA", str(tmp_path))
    assert parse_case(data).content_hash() == first
    others = ({"source": "sst2"}, {"source": "cola", "split": "validation"}, {"source": "sample"})
    assert len({first, *(parse_case(data | {"data": other}).content_hash() for other in others)}) == 4


@pytest.mark.parametrize("key", [{"text": 3}, {"label": 1}, {"header": False}, {"config": "cola"}])
def test_a_named_set_has_its_own_columns(key: dict[str, object]):
    with pytest.raises(BadInputError, match=f"has its own columns; remove {next(iter(key))}"):
        parse_case({"attack": {"name": "dager"}, "data": {"source": "cola"} | key})
