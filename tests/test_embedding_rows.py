"""The word embedding's own gradient names the words of a batch, where nothing else touched its rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.leakage.rowspace.embedding_rows import words_of
from gradaudit.leakage.rowspace.growth import AcceptedTokens, GrowthRules
from gradaudit.leakage.rowspace.past_width import Crowd
from gradaudit.leakage.rowspace.subspace import span
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import LocalTraining
from tiny_models import DECODERS, FAMILIES, batch_of, seen_of, sentences

SGD = LocalTraining("sgd", learning_rate=0.01, epochs=2)
ADAM = LocalTraining("adamw", learning_rate=1e-3, epochs=2)
DECAY = LocalTraining("adamw", learning_rate=1e-3, epochs=2, weight_decay=0.1)


def attacked(seen, **fields):
    return build("attack", "dager", fields)(seen, stream(0, "attack"))


def told(model, texts=None, selection="all", **client):
    batch = batch_of(model, texts or sentences([4, 3, 5], 5))
    found = words_of(seen_of(Client(model, **client), batch, selection))
    return None if found is None else set(found.tolist()), {t for s in batch.sequences() for t in s}


@pytest.mark.parametrize("training", [LocalTraining(), SGD, ADAM])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_the_words_of_the_batch_and_no_others(load, family, training):
    found, truth = told(load(family), training=training)
    assert found == truth


@pytest.mark.parametrize("dropout", [False, True])
def test_dropout_hides_no_word(load, dropout):
    found, truth = told(load("bert"), dropout=dropout)
    assert found == truth


@pytest.mark.parametrize(
    ("why", "client"),
    [
        ("noise touches every row", {"defenses": ("gaussian", {"sigma": 1e-6})}),
        ("the smallest coordinates are gone, and maybe words", {"defenses": ("topk", {"keep": 0.02})}),
        ("small ones are rounded to zero", {"defenses": ("quantize", {"bits": 4})}),
        ("weight decay changes every row", {"training": DECAY}),
        ("it is not trained", {"freeze": ("embeddings",)}),
    ],
)
def test_rows_that_are_not_the_words_alone_are_not_read(load, why, client):
    if "defenses" in client:
        name, fields = client["defenses"]
        client = {"defenses": (build("defense", name, fields),)}
    assert told(load("gpt2"), **client)[0] is None, why


def test_rows_of_a_tied_output_layer_or_not_shared_say_nothing(load):
    assert told(load("gpt2", "causal-lm"))[0] is None
    assert told(load("gpt2"), selection="*:q,k,v")[0] is None


@pytest.mark.parametrize("family", DECODERS)
def test_only_words_of_the_batch_are_looked_at(load, family):
    """Of any words named, no others come back: also where all of the vocabulary lies in block 0's row space."""
    model = load(family)
    batch = batch_of(model, sentences([4, 3, 5], 5))
    seen = seen_of(Client(model), batch)
    first = span(seen, 0, ("q", "k", "v"), noise=True)
    named = words_of(seen)
    for tolerance in (None, 1e9):
        for position in range(3):
            some = AcceptedTokens(model, first, tolerance, named).at(position)
            here = {s[position] for s in batch.sequences()}
            assert here <= set(some.tolist()) <= set(named.tolist())


def test_a_word_that_is_not_named_is_not_accepted_under_noise_either(load):
    model = load("bert")
    seen = seen_of(Client(model, defenses=(build("defense", "quantize", {"bits": 16}),)), batch_of(model, ["w1 w2 w3"]))
    first = span(seen, 0, ("q", "k", "v"), noise=True)
    assert first.lost is not None
    every = AcceptedTokens(model, first, None).at(1)
    assert len(every) > 0
    left_out = int(every[0])
    named = torch.tensor([i for i in range(model.vocabulary_size) if i != left_out])
    assert left_out not in AcceptedTokens(model, first, None, named).at(1).tolist()


def test_past_the_width_of_block_0_too_the_named_words_are_tried(load):
    model = load("gpt2")
    seen, named = seen_of(Client(model), batch_of(model, sentences([4, 3], 5))), torch.tensor([9, 11])
    crowd = Crowd(seen, GrowthRules(words=named))
    assert crowd._likely_words(lambda rows: rows[:, 0], 0) is named
    assert len(Crowd(seen, GrowthRules())._likely_words(lambda rows: rows[:, 0], 0)) > 2


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("client", [{}, {"training": SGD}])
def test_with_and_without_the_rows_the_same_sentences_come_back(load, family, client):
    model = load(family)
    batch = batch_of(model, sentences([3, 4], 5))  # two steps have twice the rank, of a tiny width
    seen = seen_of(Client(model, **client), batch)
    truth = Counter(tuple(s) for s in batch.sequences())
    with_rows, without = attacked(seen), attacked(seen, embedding_rows=False)
    assert Counter(with_rows.sequences) == truth == Counter(without.sequences)
    if model.absolute_positions:
        assert with_rows.details["candidates"] <= without.details["candidates"]


def test_rows_of_another_batch_lead_nowhere(load):
    """The swap control of the rows alone: named words that are not the batch's are no sentences."""
    model = load("gpt2")
    one, other = (batch_of(model, sentences([4, 3], seed)) for seed in (5, 6))
    seen, wrong = seen_of(Client(model), one), seen_of(Client(model), other)
    name = model.group("word")[0]
    swapped = {**seen.tensors, name: wrong.tensors[name]}
    found = attacked(type(seen)(**{**vars(seen), "tensors": swapped}))
    words = set(words_of(wrong).tolist())
    assert not {t for s in found.sequences for t in s} - words
    assert not Counter(found.sequences) & Counter(tuple(s) for s in other.sequences())
    assert torch.equal(seen.tensors[name], seen_of(Client(model), one).tensors[name])
