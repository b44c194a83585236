"""The embedded sample, the public word list, and the finder of sensitive spans."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from gradaudit.data.draw import draw
from gradaudit.data.sensitive import spans
from gradaudit.data.spec import DataSpec
from gradaudit.data.text import SAMPLE, load_rows

SENTENCES = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]


def words(text: str) -> list[str]:
    return re.findall(r"\S*\w\S*", text)


def bare(text: str) -> set[str]:
    """Return the words of a text without their outer punctuation."""
    return {re.sub(r"^\W+|\W+$", "", word) for word in words(text)}


# --- the sample


def test_every_row_has_its_three_columns():
    assert 55 <= len(SENTENCES) <= 65
    for row in SENTENCES:
        assert set(row) == {"text", "label", "sensitive"}
        assert row["label"] in (0, 1)
        assert 6 <= len(words(row["text"])) <= 20, row["text"]
        assert row["text"] == row["text"].strip()


def test_every_sensitive_substring_occurs():
    for row in SENTENCES:
        assert row["sensitive"], row["text"]
        for part in row["sensitive"]:
            assert part in row["text"]
            assert part == part.strip()
            assert part


def test_labels_are_balanced_and_not_in_alternation():
    labels = [row["label"] for row in SENTENCES]
    assert 0.4 <= sum(labels) / len(labels) <= 0.6
    assert 0.25 <= sum(a == b for a, b in pairwise(labels)) / len(labels) <= 0.75


def test_no_two_rows_are_alike():
    plain = [" ".join(sorted(bare(row["text"].lower()))) for row in SENTENCES]
    assert len(set(plain)) == len(plain)


def test_no_opening_dominates():
    openings = Counter(row["text"].split()[0] for row in SENTENCES)
    assert max(openings.values()) <= 4


def test_phone_numbers_and_mail_addresses_are_fictional():
    joined = "\n".join(row["text"] for row in SENTENCES)
    phones = re.findall(r"\b\d{3}-\d{4}\b", joined)
    mails = re.findall(r"\S+@(\S+)", joined)
    assert phones
    assert mails
    assert all(phone.startswith("555-01") for phone in phones)
    assert all(re.match(r"example\.(com|org)\b", domain) for domain in mails)


def test_some_names_are_not_ascii():
    assert 2 <= sum(not row["text"].isascii() for row in SENTENCES) <= 6


def test_the_first_four_rows_suit_the_demo():
    first = SENTENCES[:4]
    assert {row["label"] for row in first} == {0, 1}
    split = [words(row["text"].lower()) for row in first]
    assert all(7 <= len(row) <= 14 for row in split)
    shared = sum(
        len(column) - len(set(column))
        for place in range(14)
        for column in [[row[place] for row in split if place < len(row)]]
    )
    assert shared <= 1


def test_the_sample_loads_with_its_own_label():
    rows = load_rows(DataSpec(), Path("/nowhere"))
    assert rows.texts == tuple(row["text"] for row in SENTENCES)
    assert rows.labels == tuple(row["label"] for row in SENTENCES)
    assert rows.classes == ("0", "1")
    assert rows.where == "the embedded sample"
    assert draw(DataSpec(batch_size=4), rows) == [(0, 1, 2, 3)]


# --- the public prior


def test_frequent_words():
    lines = (SAMPLE.parent / "frequent_words.txt").read_text(encoding="ascii").splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert 190 <= len(listed) <= 210
    assert len(set(listed)) == len(listed)
    assert all(re.fullmatch(r"[a-z]+('[a-z]+)?", word) for word in listed)
    assert listed[0] == "the"
    assert {"of", "and", "to", "a", "in"} <= set(listed[:8])


def test_frequent_words_give_away_nothing_sensitive():
    lines = set((SAMPLE.parent / "frequent_words.txt").read_text(encoding="ascii").splitlines())
    secret = {word.lower() for row in SENTENCES for part in row["sensitive"] for word in bare(part)}
    assert not secret & lines - {"may"}  # the month, which is also a common verb


# --- sensitive spans


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("call 555-0147, at 14:30, dose 3.5.", ["555-0147", "14:30", "3.5"]),
        ("it cost $1,250.00 (or 40%) for B12", ["1,250.00", "40", "B12"]),
        ("mail anna.berg@example.org, or <x@example.com>.", ["anna.berg@example.org", "x@example.com"]),
        ("we met Anna Berg, Jonas and Zoë Müller", ["Anna Berg", "Jonas", "Zoë Müller"]),
        ("Tell Anna. Then call Berg! Did Ola? Yes", ["Anna", "Berg", "Ola"]),
        ('He said "wait." Then Anna left', ["Anna"]),
        ("Then I said I'm sure I've seen I’d", []),
        ("and I saw I Anna", ["Anna"]),
        ("see Dr. Berg and Mrs. Halvorsen's son", ["Berg", "Halvorsen"]),
        ("Dr. Berg is here", ["Berg"]),
        ("ask J. Berg or O'Neil or Anne-Marie", ["J. Berg", "O'Neil", "Anne-Marie"]),
        ("tell Anna's Berg", ["Anna", "Berg"]),
        ("on 14 March and again on 14 March", ["14", "March"]),
        ("one line\nThen Anna", ["Anna"]),
        ("Happy day\u2014Anna is here", ["Anna"]),
        ("we left ... Then Anna", ["Anna"]),
        ("- Then Anna", ["Anna"]),
        ('and Anna "Berg" or (Ola', ["Anna", "Berg", "Ola"]),
        ("we met Anna  Berg 12 Ola", ["Anna", "Berg", "12", "Ola"]),
        ("so did I. Then plan b. Then Anna", ["Anna"]),
        ("nothing here at all.", []),
        ("... !? -- '", []),
        ("", []),
    ],
)
def test_spans_by_example(text, found):
    assert spans(text) == found


def test_every_span_is_a_substring_and_listed_once():
    for row in SENTENCES:
        found = spans(row["text"])
        assert all(part in row["text"] for part in found)
        assert len(set(found)) == len(found)


def test_spans_find_what_was_annotated_and_little_else():
    annotated = found = right = exact = 0
    for row in SENTENCES:
        seen = spans(row["text"])
        seen_words = {word for part in seen for word in bare(part)}
        secret_words = {word for part in row["sensitive"] for word in bare(part)}
        annotated += len(row["sensitive"])
        # "14 March" is found when both of its words are, because spans gives them one by one
        right += sum(bare(part) <= seen_words for part in row["sensitive"])
        exact += sum(part in seen for part in row["sensitive"])
        found += len(seen_words & secret_words) / max(len(seen_words), 1)
    assert right / annotated >= 0.9
    assert exact / annotated >= 0.8
    assert found / len(SENTENCES) >= 0.9, "a finder that marks every word must fail here"
