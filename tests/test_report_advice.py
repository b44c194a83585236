"""What the report tells a reader to do, to read first and to leave aside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradaudit.case import load_case
from gradaudit.metrics.summary import summarize
from gradaudit.record import WordScores
from gradaudit.report import advice, sections
from gradaudit.verdict.run import verdicts
from made_reports import Markup, make_info, make_marks, make_record, make_run, make_summaries, page


def steps(records) -> list[str]:
    summaries = make_summaries(records)
    return advice.next_steps(verdicts(summaries, records), summaries, records)


def test_the_setting_that_gave_the_least_is_named_where_it_does_not_leak_by_itself() -> None:
    records, _ = make_run()
    told = steps(records)
    assert "“noise 0.01” gave the least: ROUGE-L 9.0 by “decode”, blind guessing 7.9" in told[1]
    assert told[-1] == advice.REPEAT
    leaking = [r for r in records if r.setting == "dropout off"]
    both = leaking + [r.model_copy(update={"setting": "again"}) for r in leaking]
    assert "None of the 2 settings measured here is known to be enough" in steps(both)[1]


def test_a_setting_whose_words_leak_is_not_advised_for_its_sentences() -> None:
    """As adapters: no sentence is read, and every word is named."""
    records, _ = make_run()
    leaking = [r for r in records if r.setting == "dropout off"]
    named = {
        "words": WordScores(precision=100.0, recall=100.0),
        "baseline_words": WordScores(precision=0.0, recall=5.0),
    }
    quiet = [r.model_copy(update={"setting": "noise 0.01"}) for r in records if r.setting == "noise 0.01"]
    assert "“noise 0.01” gave the least" in steps(leaking + quiet)[1]
    told = leaking + [r.model_copy(update=named) for r in quiet]
    assert "known to be enough" in advice.next_steps(verdicts(summarize(told), told), summarize(told), told)[1]


@pytest.mark.parametrize(
    ("flags", "said"), [(("few-batches",), "at least 10 batches"), (("dropout-not-modeled",), "reads dropout")]
)
def test_flags_bring_what_to_do_about_them(flags, said) -> None:
    assert any(said in step for step in steps([make_record(flags=flags)]))
    assert not any(said in step for step in steps([make_record()]))


def test_what_an_attack_cannot_read_is_no_advice_where_another_read_it() -> None:
    exact = {"sentences": (make_marks(exact=True),) * 2, "scores": dict.fromkeys(make_record().scores, 100.0)}
    reads, blocked = make_record(attack="decode", **exact), make_record(attack="dager", flags=("dropout-not-modeled",))
    assert any("reads dropout" in step for step in steps([blocked]))
    assert not any("reads dropout" in step for step in steps([reads, blocked]))


def test_no_audit_is_called_safe_and_what_is_advised_can_be_done(tmp_path: Path) -> None:
    told = steps([make_record()])[0]
    assert "Do not report this as safe" in told
    case = tmp_path / "case.toml"
    case.write_text('[attack]\nname = "tag"\nsteps = 5\n', encoding="utf8")
    option = re.search(r"--set '(.+?)'", told)
    assert option is not None
    assert load_case(case, [option[1]]).attack == {"name": "auto", "budget": 1200}


def test_the_card_shows_the_sentence_that_was_read_best_and_hides_its_words() -> None:
    shown, hidden = Markup(page(True)).text, Markup(page(False)).text
    assert "Read from the update by decode proven Zbigniew Kowalczyk received" in shown
    assert "One sentence of many, words hidden" in hidden
    assert "Zbigniew" not in hidden


def test_that_weaker_attacks_failed_is_no_caution_against_a_leak() -> None:
    assert "a better search would have read more" not in page().split('class="facts"')[0]
    records = [r for r in make_run()[0] if r.setting == "noise 0.01"]
    assert "a better search would have read more" in page(records=records, texts=[]).split('class="facts"')[0]


def test_of_attacks_that_read_as_much_the_one_that_proves_it_is_named() -> None:
    exact = {"sentences": (make_marks(exact=True),) * 2, "scores": dict.fromkeys(make_record().scores, 100.0)}
    records = [
        make_record(attack="dager", **exact),
        make_record(attack="prover", certificates={"proven": 2}, **exact),
    ]
    summaries = make_summaries(records)
    sentence = verdicts(summaries, records).overall.sentence
    assert "“prover” recovered 2 of 2 sentences exactly" in sentence
    assert "2 sentences are proven by the update itself" in sentence
    assert sections.pair_order(make_info(), summaries, records)[0][1] == "prover"


def test_of_settings_that_leak_as_much_the_one_with_proofs_is_the_verdict() -> None:
    exact = {"sentences": (make_marks(exact=True),) * 2, "scores": dict.fromkeys(make_record().scores, 100.0)}
    first = make_record(setting="first", **exact)
    records = [first, make_record(setting="second", certificates={"proven": 2}, **exact)]
    judged = verdicts(make_summaries(records), records)
    assert judged.worst == "second"
    assert "in the setting “second”" in judged.overall.sentence
    assert "The same holds for “first”" in judged.overall.sentence


def test_the_attack_that_read_it_is_named_where_several_were_tried() -> None:
    exact = {"sentences": (make_marks(exact=True),), "scores": dict.fromkeys(make_record().scores, 100.0)}
    records = [make_record(attack="auto", details={"read_by": "dager"}, batch_size=1, **exact)]
    text = Markup(page(records=records, texts=[])).text
    assert "the attack “auto (dager)” recovered" in text
    assert "auto (dager), dropout off" in text


def test_who_sees_the_update_before_noise_is_said() -> None:
    assert advice.who_sees([make_record()]).startswith("No defense acts")
    assert "it alone sees the update before them" in advice.who_sees([make_record(knowledge={"defenses": ["x"]})])


def test_pages_of_two_cases_have_titles_of_their_own() -> None:
    named = page(info=make_info(case_data={"name": "Ward 7"}, settings={}))
    assert "<title>Leaks: Ward 7, minilm, 21 November 2025" in named
    assert named.count("(random weights)") == 0
    title = {"title": "gpt2 (random weights)", "random_weights": True}
    assert page(info=make_info(model=title)).split("<main>")[0].split("</title>")[1].count("(random weights)") == 1
