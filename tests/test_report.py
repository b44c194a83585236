"""The report page: escaping, redaction, marks, sections, size."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from gradaudit.flags import FLAGS
from gradaudit.record import (
    Mark,
)
from gradaudit.report.render import MOST_BYTES
from gradaudit.report.sections import threats
from gradaudit.report.visible import Veil, block, visible
from gradaudit.report.wording import KNOWLEDGE
from gradaudit.scores import SCORES
from made_reports import (
    HOSTILE,
    ORIGINAL,
    RECOVERED,
    Markup,
    make_info,
    make_marks,
    make_record,
    make_run,
    make_texts,
    page,
)

TEXT_SCORES = SCORES["text"].names


# --- the page ---


@pytest.mark.parametrize("show_text", [False, True])
def test_markup_is_well_formed_and_closed_to_the_network(show_text: bool) -> None:
    html = page(show_text)
    seen = Markup(html)
    assert seen.open == []
    assert len(seen.ids) == len(set(seen.ids))
    assert set(seen.labelled) <= set(seen.ids)
    assert '<html lang="en">' in html
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in html
    assert "<script" not in html.lower()
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(seen.tags)
    links = [value for name, value in seen.attributes if name == "href"]
    assert links
    assert all(link.startswith("#") and link[1:] in seen.ids for link in links), "within the page"
    assert not [name for name, _ in seen.attributes if name.startswith("on") or name in ("src", "style")]
    assert not re.search(r"https?://|url\(|@import|//[a-z]", html, re.IGNORECASE)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]", html)


def test_headings_step_by_one_level() -> None:
    levels = [int(tag[1]) for tag in Markup(page()).tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_tables_have_captions_and_scopes() -> None:
    html = page()
    tables = re.findall(r"<table.*?</table>", html, re.DOTALL)
    assert len(tables) >= 5
    for table in tables:
        assert "<caption>" in table
        assert all("scope=" in head for head in re.findall(r"<th\b[^>]*>", table))


def test_words_are_hidden_unless_asked_for() -> None:
    html = page(show_text=False)
    for word in (*ORIGINAL, *RECOVERED):
        if word not in ("on", "by"):  # the page's own words
            assert word.casefold() not in html.casefold()
    for part in set(HOSTILE) - {"<!--", "</style>"}:  # the page has a style of its own
        assert part not in html
        assert part.replace("<", "&lt;") not in html
    assert "█" in html
    assert "gradaudit report DIR --show-text" in html
    assert "Zbigniew" in page(show_text=True)


def test_words_quoted_by_errors_remarks_and_the_case_are_hidden() -> None:
    records, texts = make_run()
    leaky = [
        r.model_copy(
            update={
                "error": "token 'Kowalczyk' is not in the vocabulary" if r.error else None,
                "notes": ("stuck at penicillin",),
            }
        )
        for r in records
    ]
    info = make_info(case_data={"texts": [" ".join(ORIGINAL)], "seed": 1})
    html = page(records=leaky, texts=texts, info=info)
    assert "is not in the vocabulary" in html
    assert "stuck at" in html
    for word in ("kowalczyk", "penicillin", "morphine"):
        assert word not in html.casefold()


def test_hidden_words_keep_their_marks_and_only_their_rough_length() -> None:
    html = page(show_text=False)
    for mark in ("right", "misplaced", "wrong", "missing"):
        assert re.search(rf'<bdi class="{mark}">█+</bdi>', html)
    assert len({block(word) for word in ("a", "ab", "abcd", "abcdefg", "abcdefgh", "a" * 40)}) == 3
    assert "3 right place, 2 wrong place, 1 wrong word" in html


def test_marks_have_a_text_alternative() -> None:
    html = page(show_text=True)
    assert '<bdi class="wrong">penicillin</bdi><span class="vh"> (wrong word)</span>' in html
    assert '<bdi class="missing">morphine</bdi><span class="vh"> (missing)</span>' in html
    assert '<bdi class="misplaced">received</bdi><span class="vh"> (wrong place)</span>' in html
    assert '<bdi class="right">Zbigniew</bdi> ' in html
    assert "3 right place, 2 wrong place, 3 missing" in html


def test_hostile_words_are_shown_as_text() -> None:
    html = page(show_text=True)
    text = Markup(html).text
    assert "<script>alert(1)</script>" in text
    assert '"onmouseover="alert(2)' in text
    assert "abc⟨U+202E⟩def" in text
    assert "zero⟨U+200B⟩width" in text
    assert "nul⟨U+0000⟩l" in text
    assert "new⟨U+2028⟩line" in text
    assert "{{7*7}}" in text


def test_hostile_names_are_neutralized_everywhere() -> None:
    evil = '"><script>alert(3)</script>\u202e'
    records, texts = make_run()
    records = [r.model_copy(update={"setting": evil + r.setting, "attack": evil + r.attack}) for r in records]
    records = [
        r.model_copy(
            update={
                "error": evil,
                "notes": (evil,),
                "flags": (evil,),
                "knowledge": {evil: evil},
                "sentences": tuple(m.model_copy(update={"certificate": evil}) for m in r.sentences),
                "spectrum": r.spectrum and r.spectrum.model_copy(update={"roles": evil}),
                "published": {evil: {"rouge1": 1.0}},
            }
        )
        for r in records
    ]
    info = make_info(
        program=evil,
        case=evil,
        case_data={evil: evil},
        model={"title": evil, "fingerprint": evil},
        data={evil: evil},
        versions={evil: evil},
        device=evil,
        settings={evil: evil},
        made=evil,
    )
    html = page(show_text=True, info=info, records=records, texts=texts)
    seen = Markup(html)
    assert seen.open == []
    assert "script" not in seen.tags
    assert "\u202e" not in html


def test_visible_leaves_living_scripts_alone() -> None:
    for text in ("naïve Zürich", "Здравствуйте", "日本語", "हिन्दी", "שלום", "e\u0301"):
        assert visible(text) == text
    assert visible("a\u0301\u0301\u0301\u0301\u0301") == "a\u0301\u0301\u0301⟨U+0301⟩⟨U+0301⟩"
    assert visible("\ud800") == "⟨U+D800⟩"
    assert visible("a\nb\tc", keep="\n") == "a\nb⟨U+0009⟩c"


def test_veil_hides_whole_words_only() -> None:
    record = make_record(sentences=(make_marks(),))
    veil = Veil([make_texts(record)])
    assert veil("on Wednesday, ortho") == "on ███████, ortho"
    assert Veil([])("Wednesday") == "Wednesday"


def test_without_texts_marks_are_still_shown() -> None:
    html = page(show_text=True, texts=[])
    assert re.search(r'<bdi class="missing">█+</bdi>', html)
    assert "texts.jsonl" in html
    assert Markup(html).open == []


def test_sections_say_what_was_measured() -> None:
    text = Markup(page()).text
    assert "Private text can be read back" in text
    assert "90.0 [88.0, 92.0] blind 7.9" in text
    assert "out of memory at step 3" in text
    assert "not identifiable: two words embed alike" in text
    assert "Lengths how long each sentence is, in tokens given 10, 12" in text
    assert "Labels the class label of each sentence not given" in text
    assert "0-5:q,k,v" in text
    assert "11.7 %" in text
    assert "trained weights" in text
    assert "docs/flags.md#" + next(iter(FLAGS)) in text
    assert FLAGS[next(iter(FLAGS))][1:] in text
    assert "LAMP" in text
    assert "2.13.0" in text
    assert "“noise 0.01” no attack read back clearly more" in text


def test_random_weights_are_said_at_the_top() -> None:
    model = {**make_info().model, "random_weights": True}
    html = page(info=make_info(model=model))
    assert "(random weights)" in html
    assert "random weights, not trained ones" in html
    assert "say little about a trained model" in html


def test_undefined_scores_and_single_batches_have_no_interval() -> None:
    record = make_record(scores={**dict.fromkeys(TEXT_SCORES, 12.0), "rouge2": None}, sentences=(make_marks(),))
    html = page(records=[record], texts=[], info=make_info(model={}, data={}, versions={}, settings={}))
    assert Markup(html).open == []
    assert "[" not in Markup(html).text.split("Scores by setting")[1].split("The load is")[0]


def test_knowledge_items_are_all_explained() -> None:
    types = pytest.importorskip("gradaudit.types")
    assert set(KNOWLEDGE) == set(types.Knowledge.__dataclass_fields__)


def test_attacks_that_were_given_the_same_share_one_table() -> None:
    same = [make_record(attack=name, knowledge={"batch_size": 2}) for name in ("a", "b", "blind")]
    found = threats(same, [("dropout off", name) for name in ("a", "b", "blind")])
    assert [item.who for item in found] == ["Every attack in every setting"]
    differing = [make_record(batch=i, knowledge={"lengths": [i, 2]}) for i in range(3)]
    [item] = threats(differing, [("dropout off", "decode")])
    assert item.given[0][2] == "differs by batch, for example 0, 2"


# --- size ---


def test_500_records_stay_below_the_limit() -> None:
    words = tuple(f"word{i}" for i in range(120))
    marks: tuple[Mark, ...] = ("right",) * 120
    sentences = (make_marks(recovered=marks, original=marks),) * 8
    records = [
        make_record(batch=i, attack=f"attack{i % 5}", setting=f"s{i % 4}", sentences=sentences) for i in range(500)
    ]
    texts = [
        make_texts(r).model_copy(update={"original_words": (words,) * 8, "recovered_words": (words,) * 8})
        for r in records
    ]
    html = page(show_text=True, records=records, texts=texts)
    assert len(html.encode()) < MOST_BYTES
    assert re.search(r"\d+ of 200 sentences are left out", html)
    assert "… and 40 more words" in html
    assert Markup(html).open == []


def test_no_run_is_too_large_for_the_limit() -> None:
    long = "\u202e" * 3000
    sentences = (make_marks(recovered=("right",) * 300, original=("right",) * 300),) * 4
    records = [
        make_record(
            batch=i,
            attack=f"{i}{long}",
            setting=f"{i % 40}{long}",
            sentences=sentences,
            error=f"{i}{long}" if i % 2 else None,
            notes=(f"{i}{long}",),
            knowledge={f"{i}": long},
        )
        for i in range(500)
    ]
    texts = [
        make_texts(r).model_copy(
            update={"original_words": ((long,) * 300,) * 4, "recovered_words": ((long,) * 300,) * 4}
        )
        for r in records
    ]
    html = page(show_text=True, records=records, texts=texts, info=make_info(case_data={"x": long * 30}))
    assert len(html.encode()) < MOST_BYTES
    assert Markup(html).open == []
