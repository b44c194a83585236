"""The spectrum drawing and the verdict rules."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from gradaudit.record import (
    Record,
    Spectrum,
)
from gradaudit.report.spectrum import spectrum_svg
from gradaudit.scores import SCORES
from gradaudit.verdict.run import verdict, verdicts
from made_reports import (
    make_marks,
    make_record,
    make_summaries,
)

TEXT_SCORES = SCORES["text"].names


# --- the drawing ---


def make_spectrum(**changed: Any) -> Spectrum:
    fields: dict[str, Any] = {
        "layer": 0,
        "roles": "qkv",
        "values": (1.0, 0.1, 1e-9, 0.0),
        "rank": 2,
        "tokens": 2,
        "width": 4,
        "confidence": 1e8,
    }
    return Spectrum(**{**fields, **changed})


def test_spectrum_is_labelled_and_well_formed() -> None:
    tree = ElementTree.fromstring(spectrum_svg(make_spectrum(roles="<q>&\u202e")))
    assert tree.attrib["role"] == "img"
    assert "viewBox" in tree.attrib
    assert "block 0 (<q>&⟨U+202E⟩)" in (tree[0].text or "")
    labels = [node.text for node in tree.iter("text")]
    assert {"rank = 2", "tokens b = 2", "width d = 4"} <= set(labels)


@pytest.mark.parametrize("values", [(), (1.0,), (0.0, 0.0), (1.0,) * 5000, (float("nan"), 1.0), (1.0, 1e-300)])
def test_spectrum_takes_any_values(values: tuple[float, ...]) -> None:
    drawn = spectrum_svg(make_spectrum(values=values, tokens=None, rank=len(values), width=8))
    ElementTree.fromstring(drawn)
    assert "tokens b" not in drawn
    assert "nan" not in drawn
    assert len(drawn) < 30_000


def test_spectrum_points_beyond_its_edge_when_tokens_exceed_width() -> None:
    assert "tokens b = 9000 →" in spectrum_svg(make_spectrum(tokens=9000))


# --- the verdict ---


def judge(*records: Record) -> Any:
    return verdict(make_summaries(records), records)


def scored(value: float, **changed: Any) -> Record:
    return make_record(
        scores={**dict.fromkeys(TEXT_SCORES, value), "exact": changed.pop("exact", 0.0)},
        baseline={**dict.fromkeys(TEXT_SCORES, 8.0), "exact": changed.pop("guessed", 0.0)},
        **changed,
    )


def test_leaks_when_one_sentence_is_exact() -> None:
    found = judge(scored(50.0, sentences=(make_marks(exact=True), make_marks())), scored(0.0, batch=1))
    assert found.level == "leaks"
    assert "“decode” recovered 1 of 4 sentences exactly" in found.sentence
    assert "at least one sentence exactly" in found.rule


def test_other_settings_that_leak_are_named_beside_the_worst() -> None:
    exact = (make_marks(exact=True),)
    leaking = [scored(50.0, sentences=exact, setting=f"off {n}") for n in range(6)]
    partly = scored(28.0, setting="adapters")
    found = judge(*leaking, partly, scored(8.0, setting="noise")).sentence
    assert "in the setting “off 0”" in found
    assert "The same holds for “off 1”, “off 2”, “off 3” and 2 more settings." in found
    assert found.endswith("Part comes back in “adapters”.")
    assert "noise" not in found


def test_leaks_when_a_long_sentence_is_almost_exact() -> None:
    near = make_marks(rougeL=95.0)
    assert judge(scored(20.0, sentences=(near,))).level == "leaks"
    short = make_marks(rougeL=95.0, original=("right",) * 4)
    assert judge(scored(20.0, sentences=(short,))).level != "leaks"


def test_leaks_without_marks_is_read_from_the_scores() -> None:
    assert judge(scored(9.0, exact=50.0)).level == "leaks"
    assert judge(scored(9.0, exact=50.0, guessed=50.0)).level == "not shown"


def test_what_blind_guessing_matches_is_no_leak() -> None:
    exact = (make_marks(exact=True), make_marks())
    blind = scored(10.0, attack="blind", sentences=exact)
    assert judge(scored(9.0, sentences=exact), blind).level == "not shown"
    assert judge(scored(9.0, sentences=exact[::-1]), blind).level == "leaks"
    assert judge(scored(9.0, sentences=exact, guessed=50.0)).level == "not shown"


def test_the_blind_attack_never_drives_a_verdict() -> None:
    assert judge(scored(99.0, attack="blind", sentences=(make_marks(exact=True),))).level == "inconclusive"


def test_partly_needs_the_interval_above_the_baseline_by_the_margin() -> None:
    assert judge(scored(13.0), scored(20.0, batch=1)).level == "partly"
    assert judge(scored(12.9), scored(20.0, batch=1)).level == "not shown"
    found = judge(scored(28.0))
    assert found.level == "partly"
    assert "28.0 (one batch) of 100 in ROUGE-L, blind guessing 8.0" in found.sentence
    assert judge(scored(27.9)).level == "not shown"


def test_partly_on_names_and_numbers_and_on_a_single_bad_batch() -> None:
    spans = [scored(8.0, batch=i, sensitive=40.0, sensitive_baseline=1.0) for i in range(2)]
    assert "names and numbers" in judge(*spans).sentence
    bad = judge(scored(0.0), scored(58.0, batch=1))
    assert bad.level == "partly"
    assert "on its worst batch" in bad.sentence
    assert judge(scored(0.0), scored(57.9, batch=1)).level == "not shown"


def test_not_shown_never_says_safe() -> None:
    found = judge(scored(8.0), scored(0.0, batch=1, error="out of memory"))
    assert found.level == "not shown"
    assert "not evidence that the update is safe" in found.sentence
    assert "1 batch of 2 failed" in found.sentence
    assert "never means “safe”" in found.rule


def test_inconclusive_when_nothing_was_judged() -> None:
    found = judge(scored(0.0, error="out of memory"), scored(0.0, batch=1, error="out of memory"))
    assert found.level == "inconclusive"
    assert "all 2 batches failed" in found.sentence
    assert judge().level == "inconclusive"


def test_without_truth_certificates_judge() -> None:
    unknown: dict[str, Any] = {"scores": dict.fromkeys(TEXT_SCORES), "baseline": dict.fromkeys(TEXT_SCORES)}
    assert judge(make_record(**unknown, certificates={"proven": 1})).level == "leaks"
    assert judge(make_record(**unknown, certificates={"likely": 2})).level == "partly"
    assert judge(make_record(**unknown, certificates={"guess": 2})).level == "not shown"
    assert judge(make_record(**unknown)).level == "inconclusive"
    assert judge(scored(8.0, certificates={"proven": 1})).level == "not shown"


def test_the_overall_verdict_is_the_worst_setting() -> None:
    quiet, broken = scored(8.0, setting="quiet"), scored(0.0, setting="broken", error="out of memory")
    records = [quiet, broken]
    both = verdicts(make_summaries(records), records)
    assert {name: found.level for name, found in both.settings.items()} == {
        "quiet": "not shown",
        "broken": "inconclusive",
    }
    assert both.overall.level == "inconclusive"
    assert judge(quiet, broken, scored(40.0, setting="loud")).level == "partly"
    leak = scored(9.0, setting="leak", sentences=(make_marks(exact=True),))
    assert judge(quiet, broken, scored(40.0, setting="loud"), leak).level == "leaks"
    assert "none of the 2 settings" in judge(quiet, scored(8.0, setting="still")).sentence
