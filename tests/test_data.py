"""Data files: formats, labels, and one sentence for each that is wrong."""

from __future__ import annotations

import csv
import hashlib
import json

import pytest
from pydantic import ValidationError

from gradaudit.data.spec import DataSpec
from gradaudit.data.tables import LONGEST_FIELD
from gradaudit.data.text import load_rows
from made_data import LABELS, TEXTS, refusal

# --- the spec


def test_the_sample_is_the_default_and_both_ways_of_writing_it_are_equal():
    assert DataSpec() == DataSpec(source="sample")
    assert DataSpec(source=None, path=None).source == "sample"
    assert DataSpec(path="a.csv").source is None


@pytest.mark.parametrize("spec", [DataSpec(), DataSpec(path="a.csv", text=3), DataSpec(hub="x", split="test")])
def test_a_spec_survives_its_own_json(spec):
    assert DataSpec.model_validate_json(spec.model_dump_json()) == spec
    assert DataSpec(**spec.model_dump()) == spec


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"source": "sample", "path": "a.csv"}, "source and path are both given"),
        ({"path": "a.csv", "hub": "x"}, "path and hub are both given"),
        ({"config": "small"}, "config is for hub data sets only"),
        ({"path": "a.csv", "split": "test"}, "split is for hub data sets only"),
        ({"batchsize": 2}, "batchsize"),
        ({"source": "colla"}, "'sample'"),
        ({"batch_size": 0}, "batch_size"),
        ({"batches": 0}, "batches"),
        ({"skip": -1}, "skip"),
        ({"text": -1}, "text"),
        ({"text": True}, "text"),
        ({"shuffle_seed": 2**32}, "shuffle_seed"),
    ],
)
def test_a_wrong_spec_is_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        DataSpec(**fields)


def test_a_number_in_quotes_stays_a_name():
    assert DataSpec(text="0", label="1").text == "0"
    assert DataSpec(text=0).text == 0


def test_every_field_is_documented():
    assert all(field.description for field in DataSpec.model_fields.values())


# --- formats


def test_csv_round_trips_quotes_tabs_and_line_breaks(tmp_path):
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["text", "label"], *zip(TEXTS, LABELS, strict=True)])
    rows = load_rows(DataSpec(path="a.csv", label="label"), tmp_path)
    assert rows.texts == tuple(TEXTS)
    assert rows.labels == (2, 0, 2, 1)
    assert rows.classes == ("-1", "3", "7")
    assert rows.where == "a.csv"
    assert rows.sha256 == hashlib.sha256((tmp_path / "a.csv").read_bytes()).hexdigest()


def test_tsv_takes_quotes_as_plain_characters(tmp_path):
    (tmp_path / "a.tsv").write_text('n\ttext\n1\t"Open and not closed\n2\t"She" left, "he"\n', encoding="utf-8")
    rows = load_rows(DataSpec(path="a.tsv"), tmp_path)
    assert rows.texts == ('"Open and not closed', '"She" left, "he"')
    assert rows.labels is None
    assert rows.classes == ()


def test_a_csv_quote_does_hide_the_separator(tmp_path):
    (tmp_path / "a.csv").write_text('text,n\n"one, two",1\n')
    assert load_rows(DataSpec(path="a.csv"), tmp_path).texts == ("one, two",)


def test_jsonl_round_trips_and_counts_columns_in_order_of_appearance(tmp_path):
    lines = [json.dumps({"label": n, "text": t}) for t, n in zip(TEXTS, LABELS, strict=True)]
    (tmp_path / "a.JSONL").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    by_name = load_rows(DataSpec(path="a.JSONL", label="label"), tmp_path)
    by_number = load_rows(DataSpec(path="a.JSONL", text=1, label=0), tmp_path)
    assert by_name.texts == tuple(TEXTS)
    assert by_name == by_number


def test_parquet_round_trips(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"id": [1, 2, 3, 4], "text": TEXTS, "label": LABELS}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    by_name = load_rows(DataSpec(path="a.parquet", label="label"), tmp_path)
    assert by_name.texts == tuple(TEXTS)
    assert by_name.labels == (2, 0, 2, 1)
    assert load_rows(DataSpec(path="a.parquet", text=1, label=2), tmp_path) == by_name


def test_txt_is_one_text_a_line_and_keeps_blank_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\n\r\n  three\u2028 still \x0cthree\nfour".encode())
    rows = load_rows(DataSpec(path="a.txt"), tmp_path)
    assert rows.texts == ("one", "", "  three\u2028 still \x0cthree", "four")


def test_blank_lines_of_a_csv_are_not_rows(tmp_path):
    (tmp_path / "a.csv").write_text("text,n\n\none,1\n\n\ntwo,2\n\n")
    assert load_rows(DataSpec(path="a.csv"), tmp_path).texts == ("one", "two")


def test_a_column_number_counts_from_zero(tmp_path):
    (tmp_path / "a.tsv").write_text("src\t1\t*\tthe sentence\nsrc\t0\t\tanother\n")
    rows = load_rows(DataSpec(path="a.tsv", header=False, text=3, label=1), tmp_path)
    assert rows.texts == ("the sentence", "another")
    assert rows.labels == (1, 0)
    first = load_rows(DataSpec(path="a.tsv", header=False, text=0), tmp_path)
    assert first.texts == ("src", "src")


def test_the_header_is_a_row_only_without_a_header(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nhello,1\n")
    assert load_rows(DataSpec(path="a.csv", text=0), tmp_path).texts == ("hello",)
    assert load_rows(DataSpec(path="a.csv", text=0, header=False), tmp_path).texts == ("text", "hello")


def test_a_long_text_is_read_and_the_csv_limit_is_left_as_it_was(tmp_path):
    before = csv.field_size_limit()
    long = "x" * (before + 1)
    (tmp_path / "a.csv").write_text(f"text,n\n{long},1\n")
    assert load_rows(DataSpec(path="a.csv"), tmp_path).texts == (long,)
    (tmp_path / "b.csv").write_text("text,n\n" + "x" * (LONGEST_FIELD + 1) + ",1\n")
    assert "line 2 of b.csv" in refusal(DataSpec(path="b.csv"), tmp_path)
    assert csv.field_size_limit() == before


def test_the_case_folder_comes_before_the_current_one(tmp_path, monkeypatch):
    case, here = tmp_path / "case", tmp_path / "here"
    for folder in (case, here):
        folder.mkdir()
        (folder / "both.txt").write_text(folder.name)
    (here / "only.txt").write_text("only here")
    monkeypatch.chdir(here)
    assert load_rows(DataSpec(path="both.txt"), case).texts == ("case",)
    assert load_rows(DataSpec(path="only.txt"), case).texts == ("only here",)
    assert load_rows(DataSpec(path=str(here / "both.txt")), case).texts == ("here",)


# --- labels


@pytest.mark.parametrize(
    ("written", "numbers", "classes"),
    [
        (["10", "9", "10"], (1, 0, 1), ("9", "10")),
        (["spam", "ham", "spam"], (1, 0, 1), ("ham", "spam")),
        (["10", "9", "none"], (0, 1, 2), ("10", "9", "none")),
        ([" 1", "1 ", "+1"], (0, 0, 0), ("1",)),
    ],
)
def test_labels_are_numbered_by_sorted_value(tmp_path, written, numbers, classes):
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "".join(f"t\t{value}\n" for value in written))
    rows = load_rows(DataSpec(path="a.tsv", label="label"), tmp_path)
    assert (rows.labels, rows.classes) == (numbers, classes)


@pytest.mark.parametrize(
    ("written", "numbers", "classes"),
    [
        ([True, False], (1, 0), ("false", "true")),
        ([2.0, 1.0], (1, 0), ("1", "2")),
        ([5, "a"], (0, 1), ("5", "a")),
    ],
)
def test_labels_of_other_kinds(tmp_path, written, numbers, classes):
    lines = [json.dumps({"text": "t", "label": value}) for value in written]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    rows = load_rows(DataSpec(path="a.jsonl", label="label"), tmp_path)
    assert (rows.labels, rows.classes) == (numbers, classes)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("null", "line 2 of a.jsonl has no label"),
        ('" "', "line 2 of a.jsonl has no label"),
        ("NaN", "line 2 of a.jsonl has no label"),
        ("0.5", "holds a number where the label should be"),
        ("[1]", "holds a list where the label should be"),
    ],
)
def test_a_row_without_a_usable_label_is_named(tmp_path, value, said):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "t", "label": 1}}\n{{"text": "t", "label": {value}}}\n')
    assert said in refusal(DataSpec(path="a.jsonl", label="label"), tmp_path)


# --- refusals


@pytest.mark.parametrize(
    ("name", "content", "fields", "said"),
    [
        ("a.csv", b"", {}, "a.csv is empty"),
        ("a.txt", b" \n\n", {}, "a.txt is empty"),
        ("a.csv", b"text,label\n", {}, "a.csv holds no rows"),
        ("a.csv", b"txt,label\nx,1\n", {}, "among the 2 of its first line; did you mean 'txt'?"),
        ("a.csv", b"alpha,beta\nx,1\n", {"text": "q"}, "among the 2 of its first line; set text to one of them"),
        ("a.csv", b"alpha,beta\nx,1\n", {"text": "q"}, "set header = false and give column numbers"),
        (
            "a.csv",
            b"text,beta\nx,1\n",
            {"label": "lab"},
            "no column 'lab' among the 2 of its first line; set label to",
        ),
        (
            "a.csv",
            b"text,b\nx,1\n",
            {"text": 2},
            "has 2 columns and no number 2; set text to a number from 0 to 1",
        ),
        ("a.csv", b"text,b\nx,1\n", {"label": 5}, "has 2 columns and no number 5; set label to"),
        ("a.csv", b"a,b\nx,1\n", {"text": "1"}, "write text = 1, without quotes"),
        ("a.csv", b"text,text\nx,y\n", {}, "several columns 'text'; set text to a column number"),
        ("a.csv", b"x,1\n", {"header": False}, "no column 'text'; set text to a column number from 0 to 1"),
        ("a.csv", b'text,n\n"x\ny",1\nz\n', {}, "line 4 of a.csv has 1 columns where the first has 2"),
        ("a.tsv", b"text\tn\nx\t1\nz\t1\t2\n", {}, "line 3 of a.tsv has 3 columns where the first has 2"),
        ("a.csv", b'text,n\nx,1\n"open,2\nz,3\n', {}, "line 3 of a.csv breaks the csv format"),
        ("a.csv", b"text,n\nx,1\n\xff\xfe,2\n", {}, "a.csv is not UTF-8 text (line 3); save it as UTF-8"),
        ("a.txt", b"one\ntw\0o\n", {}, "a.txt holds a NUL byte (line 2)"),
        (
            "a.jsonl",
            b'{"text": "a"}\nhello\n',
            {},
            "line 2 of a.jsonl is not JSON; write one JSON object a line",
        ),
        ("a.jsonl", b"[" * 100_000, {}, "line 1 of a.jsonl is not JSON"),
        ("a.jsonl", b'\n["a"]\n', {}, "line 2 of a.jsonl is not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{"other": "a"}\n', {}, "line 2 of a.jsonl has no 'text'"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}\n', {}, "line 2 of a.jsonl holds a number where the text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', {}, "line 1 of a.jsonl holds half of a surrogate pair"),
        ("a.jsonl", b'{"id": 5}\n', {}, "no column 'text', it has 'id'; set text to one of them"),
        ("a.txt", b"one\n", {"label": "label"}, "without columns; remove label"),
        ("a.txt", b"one\n", {"text": 0}, "without columns; remove text"),
        ("a.parquet", b"PAR1 not really PAR1", {}, "a.parquet is not a readable parquet file"),
        (
            "a.xlsx",
            b"PK",
            {},
            "the ending '.xlsx' and so no known format; rename or convert it to one of .csv",
        ),
        ("notes", b"one\n", {}, "notes has no ending"),
    ],
)
def test_a_wrong_file_gets_one_sentence(tmp_path, name, content, fields, said):
    (tmp_path / name).write_bytes(content)
    assert said in refusal(DataSpec(path=name, **fields), tmp_path)


def test_the_header_hint_is_only_for_formats_with_a_header_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 5}\n')
    assert "header" not in refusal(DataSpec(path="a.jsonl"), tmp_path)


def test_missing_files_and_folders(tmp_path):
    assert f"no file a.csv in {tmp_path} or the current folder" in refusal(DataSpec(path="a.csv"), tmp_path)
    assert refusal(DataSpec(path=str(tmp_path / "a.csv")), tmp_path).endswith("a.csv; check the path")
    (tmp_path / "folder.csv").mkdir()
    assert "folder.csv is a folder" in refusal(DataSpec(path="folder.csv"), tmp_path)
    assert "cannot be looked up" in refusal(DataSpec(path="x" * 5000 + ".csv"), tmp_path)


def test_parquet_with_wrong_columns_and_missing_texts(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", None], "n": [b"x", b"y"]}), tmp_path / "a.parquet")
    assert load_rows(DataSpec(path="a.parquet"), tmp_path).texts == ("a", "")
    assert "row 0 (counted from 0) of a.parquet holds bytes" in refusal(DataSpec(path="a.parquet", text="n"), tmp_path)
    assert "no column 'q', it has 'text', 'n'" in refusal(DataSpec(path="a.parquet", text="q"), tmp_path)
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "b.parquet")
    assert "b.parquet holds no rows" in refusal(DataSpec(path="b.parquet"), tmp_path)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("fields", [{}, {"label": "label"}, {"text": "q"}, {"text": "text", "label": "7"}])
def test_a_first_line_that_is_data_by_mistake_is_not_printed(name, fields, tmp_path):
    split = "," if name == "a.csv" else "\t"
    rows = [["my secret is out", "4111 1111", "anna"], ["another one", "2", "berta"]]
    (tmp_path / name).write_text("".join(split.join(row) + "\n" for row in rows))
    said = refusal(DataSpec(path=name, **fields), tmp_path)
    assert "header = false" in said or "column number" in said
    assert not [word for word in ("secret", "4111", "anna") if word in said]
