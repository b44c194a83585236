"""The first update of fresh adapters: A has no gradient, B's is made of what A leaves of the rows."""

from __future__ import annotations

import pytest

from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.leakage.adapters.fresh import left_by
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining
from test_sparse_words import adapted, held
from tiny_models import batch_of, seen_of, sentences


@pytest.fixture(scope="module")
def fresh(folders):
    return adapted(f"random:{folders['llama']}", 16, trained=False)


@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("sgd", 0.1)], ids=["gradient", "one step of SGD"])
def test_the_first_update_tells_words_for_certain_and_sentences(fresh, training):
    batch = batch_of(fresh, sentences([5, 4], 1))
    found = Decode()(seen_of(Client(fresh, training), batch), stream(0, "attack"))
    assert {word.token for word in found.words or () if word.certain} == held(fresh, batch)
    assert len(found.words or ()) == len(held(fresh, batch))
    assert {*found.sequences} == {tuple(ids) for ids in batch.sequences()}
    assert set(found.certificates or ()) == {"likely"}


def test_a_first_step_of_adamw_tells_them_where_entries_are_below_its_bound(fresh):
    batch = batch_of(fresh, sentences([3], 1))
    found = Decode()(seen_of(Client(fresh, LocalTraining("adamw", 2e-4, eps=1e-4)), batch), stream(0, "attack"))
    assert {word.token for word in found.words or ()} == held(fresh, batch)


def test_as_many_rows_as_the_rank_say_that_nothing_follows(fresh):
    found = Decode()(seen_of(Client(fresh), batch_of(fresh, sentences([6, 6, 6, 6], 1))), stream(0, "attack"))
    assert not found.words
    assert "fewer tokens than the rank" in found.notes[0]


def test_adapters_that_were_trained_are_read_by_their_a(folders):
    model = adapted(f"random:{folders['llama']}", 16)
    assert left_by(seen_of(Client(model), batch_of(model, sentences([3], 1))), 0, stream(0, "attack")) is None


def test_noise_that_nobody_told_of_makes_no_word_certain(fresh):
    """Swap control: what lies in the span by chance is not the batch's."""
    noise = (build("defense", "gaussian", {"sigma": 1e-2, "relative": True}),)
    batch = batch_of(fresh, sentences([5, 4], 1))
    found = Decode()(seen_of(Client(fresh, defenses=noise), batch, given=Given(defenses=False)), stream(0, "attack"))
    assert not any(word.certain for word in found.words or ())


def test_an_encoder_s_sentence_has_its_words_at_their_places():
    model = adapted("minilm", 16, trained=False)
    batch = batch_of(model, sentences([6], 1))
    seen = seen_of(Client(model), batch)
    found = Decode()(seen, stream(0, "attack"))
    assert found.sequences == tuple(tuple(ids) for ids in batch.sequences())
    dropped = Decode()(seen_of(Client(model, dropout=True), batch), stream(0, "attack"))
    assert not any(word.certain for word in dropped.words or ())
