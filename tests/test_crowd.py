"""Decoders past the width: leverage, shares of sentences, and whole batches of twice as many tokens as dimensions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.leakage.rowspace.past_width import is_full
from gradaudit.leakage.rowspace.sentence_ends import copies, ends_of, share
from gradaudit.leakage.rowspace.subspace import span
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given
from tiny_models import DECODERS, MADE_UP, OTHERS, WIDTH, batch_of, make_folder, seen_of, sentences, tiny


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Load a tiny decoder whose feed-forwards are four times its width, as real ones are."""
    made = {family: make_folder(family, tmp_path_factory.mktemp(f"wide-{family}"), 4 * WIDTH) for family in DECODERS}
    return lambda family, seed=0: tiny(made[family], seed=seed)


LENGTHS = [3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5, 3]


def crowded(model, seed: int, words=MADE_UP[:12], count: int = 16):
    return batch_of(model, sentences(LENGTHS[:count], seed, words, distinct=False))


def attacked(seen, **fields):
    return build("attack", "dager", fields)(seen, stream(0, "attack"))


def test_a_sentence_s_share_is_one_where_taking_it_out_lowers_the_rank():
    """The oracle is the rank itself, at the right share and beside it."""
    rng = torch.Generator().manual_seed(1)
    left, right = (torch.randn((n, 5), generator=rng, dtype=torch.float64) for n in (20, 30))
    matrix = left @ right.T
    one = torch.outer(left[:, 2], right[:, 2])
    assert share(torch.linalg.pinv(matrix, rtol=1e-9), one) == pytest.approx(1)
    assert torch.linalg.matrix_rank(matrix - one) == 4
    assert share(torch.linalg.pinv(matrix, rtol=1e-9), 0.5 * one) == pytest.approx(0.5)
    assert torch.linalg.matrix_rank(matrix - 0.5 * one) == 5


def test_labels_of_a_sentence_and_of_its_copies():
    assert copies([1.0, -0.4]) == (0,)
    assert copies([-2.0, 1.01]) == (1,)
    assert copies([0.5, -3.0]) == (0, 0)
    assert copies([1.7, -0.7]) == (0, 1), "once with each label"
    assert copies([0.4, -0.3]) == ()


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("family", DECODERS)
def test_twice_as_many_tokens_as_the_width_come_back_exactly(wide, family, seed, rows):
    model = wide(family, seed=seed)
    batch = crowded(model, seed)
    assert batch.tokens > 1.9 * WIDTH
    found = attacked(seen_of(Client(model), batch), embedding_rows=rows)
    assert Counter(found.sequences) == Counter(tuple(s) for s in batch.sequences())
    assert any("past the width" in note for note in found.notes)


@pytest.mark.parametrize("family", DECODERS)
def test_without_the_feed_forwards_a_batch_past_the_width_comes_back_too(wide, family):
    """Leverage alone: the second matrices of the feed-forwards are not shared."""
    model = wide(family)
    batch = crowded(model, 0, count=12)
    seen = seen_of(Client(model), batch, "*:q,k,v")
    assert batch.tokens > 1.4 * WIDTH
    assert Counter(attacked(seen).sequences) == Counter(tuple(s) for s in batch.sequences())


@pytest.mark.parametrize("family", DECODERS)
def test_a_sentence_that_occurs_again_is_found_as_often(wide, family):
    model = wide(family)
    texts = sentences(LENGTHS[:13], 5, MADE_UP[:12], distinct=False)
    batch = batch_of(model, [*texts, texts[0], texts[1], texts[2]], [i % 2 for i in range(13)] + [0, 0, 0])
    found = attacked(seen_of(Client(model), batch))
    assert Counter(found.sequences) == Counter(tuple(s) for s in batch.sequences())


@pytest.mark.parametrize("family", DECODERS)
def test_sentences_of_another_batch_do_not_lie_in_the_last_block(wide, family):
    """The swap control: what is judged against is another batch."""
    model = wide(family)
    seen, other = seen_of(Client(model), crowded(model, 0)), crowded(model, 7, OTHERS[:12])
    found = attacked(seen)
    assert not Counter(found.sequences) & Counter(tuple(s) for s in other.sequences())
    ends = ends_of(seen)
    assert not any(ends.labels(tuple(s)) for s in other.sequences())


@pytest.mark.parametrize("family", DECODERS)
def test_below_the_width_labels_and_copies_are_told_too(load, family):
    model = load(family, labels=3)
    texts = sentences([4, 3, 5], 5)
    batch = batch_of(model, [*texts, texts[1]], [2, 0, 1, 2])
    seen = seen_of(Client(model), batch)
    ends, rows = ends_of(seen), [tuple(s) for s in batch.sequences()]
    assert [ends.labels(s) for s in rows[:3]] == [(2,), (0, 2), (1,)]
    assert ends.labels(rows[0][:-1]) == ()
    assert Counter(attacked(seen).sequences) == Counter(rows)


@pytest.mark.parametrize("family", DECODERS)
def test_a_row_space_is_full_only_past_the_width(load, family):
    model = load(family)
    few = seen_of(Client(model), crowded(model, 0, count=5))
    assert not is_full(model, span(few, 1, noise=True))
    assert is_full(model, span(seen_of(Client(model), crowded(model, 0)), 1, noise=True))


@pytest.mark.parametrize(
    ("why", "how"),
    [
        ("no ends of sentences", {"task": "causal-lm"}),
        ("shares need the batch size", {"given": Given(batch_size=False)}),
        ("no query gradient of the last block", {"selection": "0-1:q,k,v"}),
    ],
)
@pytest.mark.parametrize("family", DECODERS)
def test_without_what_it_takes_nothing_is_claimed(load, family, why, how):
    model = load(family, task=how.get("task", "classification"))
    batch = crowded(model, 0)
    if how.get("task"):
        batch = batch_of(model, sentences(LENGTHS, 0, MADE_UP[:12], distinct=False), None)
    seen = seen_of(Client(model), batch, how.get("selection", "all"), how.get("given"))
    found = attacked(seen)
    assert found.sequences == (), why
    assert "not identifiable" in found.notes[0]
