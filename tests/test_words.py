"""Words and their local steps from AdamW's changes of the word embedding; words scored as a set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.judge.words import score_words
from gradaudit.leakage.uneven.entries import grid
from gradaudit.leakage.uneven.words import _told, moved, read_words
from gradaudit.metrics.summary import summarize
from gradaudit.record import WordScores
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Knowledge, LocalTraining, NamedWord
from gradaudit.verdict.run import verdict
from made_reports import make_record
from tiny_models import batch_of, seen_of, sentences

HOW = LocalTraining("adamw", 5e-5, minibatch=2, weight_decay=0.01, schedule="linear", clip_norm=1.0)
ONE = replace(HOW, minibatch=None)
TEXTS = sentences([4, 5, 3, 4, 5, 4, 3, 4], 3, distinct=False)


def by_torch(how: LocalTraining, rates, gradients, rows: torch.Tensor) -> torch.Tensor:
    """Return what torch's own AdamW makes of rows, with a gradient at some steps and zeros at the others."""
    weights = torch.nn.Parameter(rows.clone())
    optimizer = torch.optim.AdamW([weights], lr=1.0, betas=how.betas, eps=how.eps, weight_decay=how.weight_decay)
    for step, rate in enumerate(rates):
        weights.grad = gradients.get(step, torch.zeros_like(rows))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return weights.detach()


@pytest.mark.parametrize("steps", [(0,), (2,), (0, 3), (1, 2, 3)])
def test_the_move_is_torchs(steps):
    rng = torch.Generator().manual_seed(0)
    rates = HOW.rates(5)
    gradients = {step: 1e-6 * torch.randn(7, generator=rng, dtype=torch.double) for step in steps}
    zeros = torch.zeros(7, dtype=torch.double)
    torch.testing.assert_close(moved(HOW, rates, gradients), by_torch(HOW, rates, gradients, zeros), rtol=1e-9, atol=0)


@pytest.mark.parametrize("number", [4, 16])
def test_rows_of_one_and_two_gradients_are_told_apart(number):
    """Gradients are drawn, torch's float32 AdamW moves the rows, and every row's steps are known."""
    rng = torch.Generator().manual_seed(number)
    how = replace(HOW, minibatch=1)
    rates = how.rates(number)
    truth, rows, grids = [], [], []
    for row in range(60):
        many = 1 + row % 3 if row % 3 < 2 else 4
        steps = tuple(sorted(torch.randperm(number, generator=rng)[: min(many, number)].tolist()))
        sizes = 10 ** (-4 + 0.3 * torch.randn(len(steps), generator=rng))
        gradients = {s: size * torch.randn(384, generator=rng) for s, size in zip(steps, sizes, strict=True)}
        start = 0.05 * torch.randn(384, generator=rng)
        kept = start.clone()
        for rate in rates:
            kept.mul_(1 - rate * how.weight_decay)
        truth.append(steps)
        grids.append(grid(start).double())
        rows.append((by_torch(how, rates, gradients, start).double() - kept.double()).abs())
    told = _told(how, rates, torch.stack(rows), torch.stack(grids))
    for count, least in ((1, 1.0), (2, 0.9)):
        own = [(a, b) for a, b in zip(truth, told, strict=True) if len(a) == count]
        assert len(own) >= 20
        assert sum(a == b for a, b in own) >= least * len(own)
    others = [b for a, b in zip(truth, told, strict=True) if len(a) > 2]
    assert sum(b is None for b in others) >= 0.3 * len(others)  # some pairs look like them


def test_a_second_gradient_in_the_last_step_does_not_hide():
    """At the last rates it moves a row by less than rows of one gradient differ, but past what one could."""
    rng = torch.Generator().manual_seed(0)
    rates = HOW.rates(32)
    rows, grids = [], []
    for first in (2, 9):
        gradients = {step: 1e-4 * torch.randn(384, generator=rng) for step in (first, 31)}
        start = 0.05 * torch.randn(384, generator=rng)
        kept = start.clone()
        for rate in rates:
            kept.mul_(1 - rate * HOW.weight_decay)
        rows.append((by_torch(HOW, rates, gradients, start).double() - kept.double()).abs())
        grids.append(grid(start).double())
    assert all(len(told or ()) != 1 for told in _told(HOW, rates, torch.stack(rows), torch.stack(grids)))


@pytest.mark.parametrize("dropout", [False, True])
def test_every_word_is_named_and_no_other_and_single_ones_with_their_step(load, dropout):
    model = load("bert")
    batch = batch_of(model, TEXTS)
    client = Client(model, HOW, dropout=dropout)
    words = read_words(seen_of(client, batch))
    assert words is not None
    assert {word.token for word in words} == {token for ids in batch.sequences() for token in ids}
    order = client.order(len(batch), stream(0, "client"))
    scores = score_words(model, batch, words, order)
    assert (scores.precision, scores.recall) == (100.0, 100.0)
    assert scores.alone is not None
    assert scores.alone > 90
    # against another order of the same batch the steps are wrong: they were read, not guessed
    other = score_words(model, batch, words, client.order(len(batch), stream(7, "client")))
    assert other.alone is not None
    assert other.alone < 60


@pytest.mark.parametrize("client", [{"freeze": ("embeddings",)}, {"training": replace(HOW, optimizer="sgd")}])
def test_nothing_is_named_where_rows_do_not_show_it(load, client):
    model = load("bert")
    assert read_words(seen_of(Client(model, **({"training": HOW} | client)), batch_of(model, TEXTS))) is None


def test_several_passes_name_words_without_steps(load):
    model = load("bert")
    words = read_words(seen_of(Client(model, replace(HOW, epochs=2)), batch_of(model, TEXTS)))
    assert words is not None
    assert all(word.steps is None for word in words)


def test_the_attack_returns_the_words_and_no_more_guesses_than_sentences(load):
    model = load("bert")
    batch = batch_of(model, TEXTS)
    found = build("attack", "decode", {})(seen_of(Client(model, HOW, dropout=True), batch), stream(0, "attack"))
    assert found.words is not None
    assert 0 < found.count <= len(batch)
    assert set(found.certificates or ()) == {"guess"}


def test_words_are_left_where_sentences_cannot_be_read(load):
    """One step with dropout off: what links words in a gradient is not read in a weight change."""
    model = load("bert")
    batch = batch_of(model, TEXTS)
    found = build("attack", "decode", {})(seen_of(Client(model, ONE), batch), stream(0, "attack"))
    assert {word.token for word in found.words or ()} == {token for ids in batch.sequences() for token in ids}
    assert len(found.notes) > 1, "why there are no sentences is said beside the words"
    assert score_words(model, batch, found.words or (), ((0, 1, 2, 3, 4, 5, 6, 7),)).minibatch is None


def test_a_training_of_absurd_length_is_not_followed(load):
    model = load("bert")
    seen = seen_of(Client(model, ONE), batch_of(model, TEXTS))
    long = replace(seen.knowledge, training=replace(ONE, epochs=10**12))
    assert read_words(replace(seen, knowledge=long)) is None


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_the_mean_rate_is_the_mean_of_the_rates(schedule):
    how = replace(HOW, schedule=schedule)
    for steps in (1, 2, 7):
        assert how.mean_rate(steps) == pytest.approx(sum(how.rates(steps)) / steps)


def test_steps_are_known_without_the_batch_size_where_minibatches_are_whole():
    assert Knowledge(training=replace(HOW, minibatch=None, epochs=3)).steps == 3
    assert Knowledge(training=HOW).steps is None
    assert Knowledge(training=HOW, batch_size=5).steps == 3
    assert Knowledge(batch_size=5).steps is None


def test_the_order_is_the_one_the_update_was_made_in(load):
    """Rows of a step whose other rows are known not to change: each step's words move at that step alone."""
    model = load("bert")
    batch = batch_of(model, TEXTS)
    client = Client(model, replace(HOW, accumulate=2))
    order = client.order(len(batch), stream(3, "client"))
    assert order is not None
    assert sorted(row for rows in order for row in rows) == list(range(len(batch)))
    assert [len(rows) for rows in order] == [4, 4]
    assert Client(model, HOW, clients=2).order(8, stream(0, "client")) is None


def test_words_are_scored_as_a_set(load):
    model = load("bert")
    batch = batch_of(model, ["stone market stone", "market river"])
    stone, market, river = (model.content(model.encode(w)[0])[0] for w in ("stone", "market", "river"))
    order = ((0,), (1,))
    right = [NamedWord(stone, (0,)), NamedWord(market, (0, 1)), NamedWord(river, (1,))]
    assert score_words(model, batch, right, order) == WordScores(
        precision=100, recall=100, minibatch=100, alone=100, twice=100
    )
    special = model.special.prefix[0]
    some = [
        NamedWord(stone, (1,)),
        NamedWord(special, (0,)),
        NamedWord(model.content(model.encode("forest")[0])[0], (0,)),
    ]
    scores = score_words(model, batch, some, order)
    assert (scores.precision, scores.recall) == (50.0, pytest.approx(100 / 3))
    assert (scores.minibatch, scores.alone, scores.twice) == (0.0, 0.0, 0.0)
    nothing = score_words(model, batch, [], None)
    assert (nothing.precision, nothing.recall, nothing.minibatch) == (0.0, 0.0, None)


@pytest.mark.parametrize(("precision", "said"), [(100.0, True), (80.0, False)])
def test_the_verdict_counts_words(precision, said):
    named, blind = (WordScores(precision=p, recall=r) for p, r in ((precision, 70.0), (20.0, 5.0)))
    low = dict.fromkeys(("rouge1", "rouge2", "rougeL", "token_accuracy", "exact"), 1.0)
    records = [
        make_record(batch=n, attack="decode", scores=low, baseline=low, sentences=(), words=named, baseline_words=blind)
        for n in range(3)
    ]
    found = verdict(summarize(records), records)
    assert ("Words leak" in str(found)) == said
