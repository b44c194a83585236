"""Scores against the rouge-score package, one-to-one matching, and laws that every comparison must keep."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenize import tokenize

from gradaudit.judge.text import TextJudge, sentence
from gradaudit.metrics.align import assign
from gradaudit.metrics.rouge import has_bigram, rouge, words
from gradaudit.metrics.summary import interval, summarize
from gradaudit.metrics.text import (
    PUBLISHED,
    ScoredSentence,
    align,
    marks,
    score,
    sensitive_share,
    split_words,
    token_accuracy,
)
from gradaudit.record import Record
from gradaudit.types import Reconstruction
from tiny_models import WORDS, batch_of

tokens = st.sampled_from(["red", "blue", "sea", "Sun", ".", "7"])
texts = st.lists(tokens, max_size=7).map(" ".join)


def made(text: str) -> ScoredSentence:
    """Return a sentence whose token ids are its words' and marks' (with case)."""
    return ScoredSentence(tuple(hash(w) for w in split_words(text)), text, f"[CLS] {text} [SEP]")


def scores_of(originals: list[str], guesses: list[str]) -> dict:
    return score(align([made(t) for t in originals], [made(t) for t in guesses]))


@settings(max_examples=60, deadline=None)
@given(texts, texts)
def test_rouge_is_the_packages_f1(a, b):
    a += " red"  # without any word the package says 0, and ours compares characters
    theirs = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False).score(a, b)
    assert rouge(a, b) == {kind: pytest.approx(100 * value.fmeasure) for kind, value in theirs.items()}


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(max_codepoint=127)))
def test_plain_english_has_the_words_of_the_package(text):
    assert words(text) == tokenize(text, None)


EXACT = [
    "Мой пин 4921 у Анны",
    "我的密码是四九二一",
    "كلمة السر هي قمر",
    "हिन्दी में लिखा",
    "รหัสของฉัน",
    "🏠🔑👨‍👩‍👧",
    "¿Mañana?",
    "?!",
    ":-)",
    "こんにちは",
]


@pytest.mark.parametrize("text", EXACT)
def test_text_of_any_script_scores_what_was_read(text):
    found = scores_of([text], [text])
    assert found["rouge1"] == found["rougeL"] == 100.0
    assert rouge(text, "something else entirely")["rougeL"] == 0.0
    assert rouge(text, "")["rougeL"] == 0.0


def test_words_of_scripts():
    assert words("Мой Пин-4921") == ["мой", "пин", "4921"]
    assert words("密码是 four") == ["密", "码", "是", "four"]
    assert words("हिन्दी में") == ["हिन्दी", "में"], "marks belong to their letter"
    assert words("ok 🏠🏠, €") == ["ok", "🏠", "🏠", "€"]
    assert rouge("密码是四", "密码是三")["rougeL"] == 75.0


def test_the_papers_scoring_stands_beside_it():
    theirs = PUBLISHED["ascii-words"]([made("пин red")], [made("пин red")])
    assert theirs["rougeL"] == 100.0
    assert PUBLISHED["ascii-words"]([made("пин")], [made("пин")])["rougeL"] == 0.0
    assert PUBLISHED["ascii-words"]([made("red sea")], [])["rougeL"] == 0.0


def test_rouge_worked_by_hand():
    # words: 3 of 3 and 3 of 6; pairs: 1 of 2 and 1 of 5; longest common order: 2 of 3 and 2 of 6
    expected = {"rouge1": 200 / 3, "rouge2": 200 / 7, "rougeL": 400 / 9}
    assert rouge("the cat sat on the mat", "the mat sat") == pytest.approx(expected)
    assert rouge("walking", "walks")["rouge1"] == 0.0, "no stemming"


def test_two_originals_cannot_claim_one_guess():
    found = scores_of(["red blue sea", "red blue sun"], ["red blue sea"])
    assert found["rougeL"] == 50.0
    assert found["exact"] == 50.0
    pairs = align([made("red blue sun"), made("red blue sea")], [made("red blue sea")])
    assert [p.guess is not None for p in pairs] == [False, True], "the better fit gets it"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_assignment_is_the_best_of_all_one_to_one(rows, columns, seed):
    table = np.random.default_rng(seed).integers(0, 5, (rows, columns)).tolist()
    found = assign(table)
    used = [c for c in found if c is not None]
    assert len(found) == rows
    assert len(used) == len(set(used)) == min(rows, columns)
    small, large = sorted((rows, columns))
    flipped = table if rows <= columns else [list(c) for c in zip(*table, strict=True)]
    every = (sum(flipped[i][c] for i, c in enumerate(p)) for p in itertools.permutations(range(large), small))
    assert sum(table[r][c] for r, c in enumerate(found) if c is not None) == max(every, default=0)


def test_missing_guesses_count_0_and_surplus_ones_nothing():
    whole = dict.fromkeys(("rouge1", "rouge2", "rougeL", "token_accuracy", "exact"), 100.0)
    assert scores_of(["red blue"], ["red blue"]) == whole
    assert scores_of(["red blue"], ["sea sun", "red blue", "7"]) == whole
    assert scores_of(["red blue", "sea sun"], ["red blue"]) == dict.fromkeys(whole, 50.0)
    assert scores_of(["red blue", "sea sun"], []) == dict.fromkeys(whole, 0.0)
    assert scores_of(["red"], [])["rouge2"] is None


def test_one_word_has_no_rouge2():
    assert not has_bigram("red .")
    assert has_bigram("red sea")
    assert scores_of(["red"], ["red"])["rouge2"] is None
    assert scores_of(["red", "sea sun"], ["red", "sea sun"])["rouge2"] == 100.0, "the other original's alone"
    assert scores_of(["red", "sea sun"], ["red"])["rouge2"] == 0.0


def test_exact_needs_equal_tokens():
    found = scores_of(["red sea ."], ["Red sea"])
    assert (found["rouge1"], found["rougeL"], found["exact"]) == (100.0, 100.0, 0.0)
    assert scores_of(["red sea"], ["Red sea"])["exact"] == 0.0
    split = ScoredSentence((1, 2, 3), "red sea", "red sea")
    assert score(align([split], [ScoredSentence((4, 3), "red sea", "red sea")]))["exact"] == 0.0, (
        "other tokens, one text"
    )
    among = align([made("red sea .")], [made("Red sea"), made("red sea ."), made("red sea 7")])
    assert among[0].guess == made("red sea ."), "among equals for ROUGE, the equal tokens win"


@pytest.mark.parametrize(
    ("original", "guess", "share"),
    [((1, 2, 3, 4), (1, 2, 3, 4), 100), ((1, 2), (1, 2, 3, 4), 50), ((1, 2, 3, 4), (1, 9), 25),
     ((1, 2), (2, 1), 0), ((), (), 100), ((1,), (), 0)],
)  # fmt: skip
def test_token_accuracy_is_over_the_longer(original, guess, share):
    assert token_accuracy(original, guess) == token_accuracy(guess, original) == share


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet", "gpt2"])
def test_special_tokens_never_score(load, family):
    model = load(family)
    batch = batch_of(model, ["river stone garden"])
    special = model.special
    frame_only = (*special.prefix, *sorted(special.ids), *special.suffix)
    wrong = (*special.prefix, *model.content(model.encode("paris twelve seven")[0]), *special.suffix)
    for guess in (frame_only, wrong):
        found = TextJudge(model, tuple(PUBLISHED)).judge(batch, Reconstruction((guess,)))
        assert set(found.scores.values()) == {0.0}
        assert found.published["max-with-replacement"] == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}
        kept = found.published["special-tokens-kept"]["rouge1"]
        assert kept > 0 if model.special.prefix else kept == 0, "the papers' way gives points for no right word"
    right = TextJudge(model).judge(batch, Reconstruction((tuple(model.content(batch.sequences()[0])),)))
    assert right.solved, "a guess without its frame is still the text"


def test_published_scorings_are_what_they_say():
    replaced, kept = PUBLISHED["max-with-replacement"], PUBLISHED["special-tokens-kept"]
    twins = [made("red blue sea"), made("red blue sea")]
    assert replaced(twins, [made("red blue sea")])["rougeL"] == 100.0
    assert kept(twins, [made("red blue sea")])["rougeL"] == 50.0
    # each score takes its own best guess
    mixed = replaced([made("a b c d")], [made("d c b a"), made("a b")])
    assert mixed["rouge1"] == 100.0
    assert 0 < mixed["rouge2"] < 100
    assert kept([made("red sun")], [made("sea")])["rouge1"] == pytest.approx(
        100 * 2 * (2 / 3 * 1 / 2) / (2 / 3 + 1 / 2)
    )
    for scoring in (replaced, kept):
        assert set(scoring([made("red sun")], []).values()) == {0.0}


def test_sensitive_share_counts_whole_names_in_their_own_sentence():
    assert sensitive_share([["Maria", "90"], ["Zoë Müller"]], ["MARIA paid 900", "zoe  muller"]) == pytest.approx(
        200 / 3
    )
    assert sensitive_share([["Maria"], []], [None, "maria"]) == 0.0
    assert sensitive_share([["art"]], ["party"]) == 0.0, "not inside another word"
    assert sensitive_share([[], []], ["a", None]) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(tokens, max_size=8), st.lists(tokens, max_size=8))
def test_marks_tell_the_truth_about_words(original, guess):
    on_guess, on_original = marks(original, guess)
    assert (len(on_guess), len(on_original)) == (len(guess), len(original))
    assert set(on_guess) <= {"right", "misplaced", "wrong"}
    assert set(on_original) <= {"right", "misplaced", "missing"}
    sides = []
    for side, marked in ((guess, on_guess), (original, on_original)):
        sides.append({m: Counter(w.lower() for w, k in zip(side, marked, strict=True) if k == m) for m in set(marked)})
    for mark in ("right", "misplaced"):
        assert sides[0].get(mark, Counter()) == sides[1].get(mark, Counter()), "both sides mark the same words"
    a, b = Counter(w.lower() for w in original), Counter(w.lower() for w in guess)
    there = sum(on_guess.count(m) for m in ("right", "misplaced"))
    assert there == sum((a & b).values()), "a word counts as often as it occurs in both"
    right_guess = [w.lower() for w, m in zip(guess, on_guess, strict=True) if m == "right"]
    right_original = [w.lower() for w, m in zip(original, on_original, strict=True) if m == "right"]
    assert right_guess == right_original, "right words are in one order"


@settings(max_examples=50, deadline=None)
@given(st.lists(tokens, min_size=1, max_size=8))
def test_marks_of_an_equal_text_are_all_right(text):
    assert marks(text, text) == (("right",) * len(text),) * 2
    assert set(marks(text, [])[1]) == {"missing"}


def test_judge_gives_marks_texts_and_certificates_of_the_aligned_guess(load):
    model = load("bert")
    batch = batch_of(model, ["maria reads the letter", "river stone"])
    guesses = tuple(tuple(model.encode(t)[0]) for t in ("stone river", "the maria letter"))
    found = TextJudge(model).judge(batch, Reconstruction(guesses, certificates=("guess", "likely")))
    assert found.recovered == ("the maria letter", "stone river")
    assert [s.certificate for s in found.sentences] == ["likely", "guess"]
    assert Counter(found.sentences[0].original) == Counter(right=2, misplaced=1, missing=1)
    assert found.original_words == (("maria", "reads", "the", "letter"), ("river", "stone"))
    assert not found.solved
    assert sentence(model, batch.sequences()[1]).with_special == "[CLS] river stone [SEP]"


def test_interval_is_a_bootstrap_of_the_mean():
    values = np.random.default_rng(1).normal(50, 10, 40).tolist()
    found = interval(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.worst == max(values)
    error = np.std(values, ddof=1) / np.sqrt(40)
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.35 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.35 * error)
    assert interval(values) == found, "the same numbers, the same interval"
    assert interval([*values, None]) == found
    assert (interval([30.0]).mean, interval([30.0]).low, interval([30.0]).n) == (30.0, None, 1)
    assert (interval([None, None]).mean, interval([None]).n) == (None, 0)
    assert (interval([5.0, 5.0]).low, interval([5.0, 5.0]).high) == (5.0, 5.0)


def record(batch: int, value: float, error: str | None = None, attack: str = "dager") -> Record:
    scores = dict.fromkeys(("rouge1", "rouge2", "rougeL", "token_accuracy", "exact"), value)
    return Record(case="c", setting="s", batch=batch, attack=attack, scores=scores, baseline=scores, load=0.1,
                  tokens=3, batch_size=1, seconds=float(batch), error=error)  # fmt: skip


def test_failures_stay_in_the_mean_as_0():
    rows = [record(0, 90.0), record(1, 0.0, "broke"), record(2, 60.0), record(0, 10.0, attack="tag")]
    first, second = summarize(rows)
    assert (first.attack, first.n, first.failed, first.scores["rougeL"].mean) == ("dager", 3, 1, 50.0)
    assert (second.attack, second.n, second.failed, second.scores["rougeL"].mean) == ("tag", 1, 0, 10.0)
    assert first.seconds == 1.0
    assert first.flags == ("few-batches",)
    assert summarize([record(n, 1.0) for n in range(10)])[0].flags == ()


def test_words_are_plain_enough_for_rouge():
    assert rouge(" ".join(WORDS[:40]), " ".join(WORDS[40:80]))["rouge1"] == 0.0


def test_what_was_found_keeps_the_labels_of_its_originals(load):
    """Found in another order than the batch's, with the truth's labels: the diagnosis would blame the optimizer."""
    model = load("bert")
    batch = batch_of(model, ["river stone", "quiet garden", "blue paper"], [1, 0, 0])
    rows = [tuple(row) for row in batch.sequences()]
    judge, surplus = TextJudge(model), tuple(batch_of(model, ["cold window"]).sequences()[0])
    for order in ([1, 2, 0], [2, 0], [1, 3, 0, 2]):
        found = Reconstruction(tuple([*rows, surplus][n] for n in order))
        guessed = judge.guessed(batch, found)
        kept = [n for n in order if n < 3]
        assert [tuple(row) for row in guessed.sequences()] == [rows[n] for n in kept]
        assert guessed.labels.tolist() == [[1, 0, 0][n] for n in kept]
    told = judge.guessed(batch, Reconstruction((rows[1], rows[0]), labels=(1, 1)))
    assert told.labels.tolist() == [1, 1], "what the attack says of labels is its own"
