"""One sentence from the embedding tables alone, words alone of several, and no proof where the tables do not tell."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.rowspace.embedding_places import sentence_of_tables
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining, Observation, Reconstruction
from tiny_models import WORDS, batch_of, seen_of, tiny

PLACED = ("bert", "roberta", "mpnet", "electra", "distilbert", "gpt2")
TEXT = "the cold river and the quiet horse walks to the river ."
"""Says two words again."""


def read(seen: Observation) -> Reconstruction:
    return Decode()(seen, stream(0, "attack"))


def sent(model, texts, selection="embeddings", **client):
    batch = batch_of(model, texts)
    return seen_of(Client(model, **({"dropout": True} | client)), batch, selection), batch.sequences()


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("family", PLACED)
def test_the_tables_give_a_sentence_whatever_was_dropped(load, family: str, dropout: bool):
    seen, truth = sent(load(family), [TEXT], dropout=dropout)
    found = read(seen)
    assert found.sequences == tuple(map(tuple, truth))
    assert found.certificates == ("proven",)


def test_each_word_stands_where_its_row_says(load):
    seen, truth = sent(load("bert"), [TEXT])
    _, name = seen.tensors
    rows = seen.tensors[name].clone()
    rows[[3, 6]] = rows[[6, 3]]
    found = read(replace(seen, tensors={**seen.tensors, name: rows}))
    wanted = list(truth[0])
    wanted[3], wanted[6] = wanted[6], wanted[3]
    assert found.sequences == (tuple(wanted),)


def test_steps_of_sgd_with_other_masks_add_up(load):
    training = LocalTraining("sgd", learning_rate=0.1, epochs=3)
    seen, truth = sent(load("bert"), [TEXT], training=training)
    assert seen.kind == "delta"
    assert read(seen).sequences == tuple(map(tuple, truth))


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("steps", [1, 12])
def test_steps_of_adamw_move_a_word_and_its_position_alike(load, steps: int, decay: float):
    training = LocalTraining("adamw", learning_rate=1e-3, epochs=steps, weight_decay=decay)
    # short ones: decay is what most rows, which no token reads, have in common
    seen, truth = sent(load("bert"), ["the cold river walks ."], training=training)
    found = sentence_of_tables(seen)
    assert found is not None
    assert (found.sequences, found.certificates) == (tuple(map(tuple, truth)), ("proven",))
    # a word that stands twice is the one that is most like its positions, which is no proof
    seen, truth = sent(load("bert"), ["the cold and the quiet ."], training=training)
    found = sentence_of_tables(seen)
    assert found is not None
    assert (found.sequences, found.certificates) == (tuple(map(tuple, truth)), ("likely",))


def test_several_steps_of_one_sentence_are_decoded_by_the_tables(load):
    training = LocalTraining("adamw", learning_rate=1e-3, epochs=3)
    seen, truth = sent(load("bert"), [TEXT], "all", training=training)
    found = read(seen)
    assert found.sequences == tuple(map(tuple, truth))
    assert {word.token for word in found.words or ()} == set(truth[0])


def test_steps_of_which_nothing_was_told_are_read_by_the_tables(load):
    batch = batch_of(load("bert"), ["the cold river walks ."])
    training = LocalTraining("adamw", learning_rate=1e-3, epochs=4, weight_decay=0.01)
    nothing = Given(batch_size=False, training=False, dropout=False, defenses=False)
    found = read(seen_of(Client(load("bert"), training=training, dropout=True), batch, "all", nothing))
    assert found.sequences == tuple(map(tuple, batch.sequences()))
    assert found.notes[0] == "read from the word and the position table alone"


def test_positions_that_began_at_zero_have_nothing_to_decay(folders):
    model = tiny(folders["bert"])
    with torch.no_grad():
        model.parameters()[model.group("position")[0]].zero_()
    training = LocalTraining("adamw", learning_rate=1e-3, epochs=2, weight_decay=0.01)
    seen, truth = sent(model, ["the cold river walks ."], training=training)
    assert read(seen).sequences == tuple(map(tuple, truth))


def test_of_several_sentences_steps_of_adamw_tell_none(load):
    training = LocalTraining("adamw", learning_rate=1e-3, epochs=2)
    texts = ["the cold river opens", "a blue horse walks .", "seven mice sing in the garden"]
    seen, _ = sent(load("bert"), texts, training=training)
    assert sentence_of_tables(seen) is None


ADAMW = LocalTraining("adamw", learning_rate=1e-3)


@pytest.mark.parametrize(
    ("texts", "client"),
    [
        (["the the cold cold river river"], {"training": ADAMW}),  # too few words stand once
        (["the cold river opens", "the cold river closes"], {"training": ADAMW}),  # more words are left than places
        (["a blue the the cold cold .", "a blue cold cold the the ."], {}),  # signals add up, and are two here
    ],
)
def test_places_that_no_word_tells_are_not_filled_at_random(load, texts: list[str], client):
    seen, _ = sent(load("bert"), texts, **client)
    assert sentence_of_tables(seen) is None


def test_a_scaled_row_tells_its_place_and_proves_nothing(load):
    seen, truth = sent(load("bert"), [TEXT])
    name = next(iter(seen.tensors))
    rows = seen.tensors[name].clone()
    rows[truth[0][2]] *= 1.01
    found = read(replace(seen, tensors={**seen.tensors, name: rows}))
    assert found.sequences == tuple(map(tuple, truth))
    assert found.certificates == ("likely",)


def test_rows_of_random_norms_and_directions_hide_nothing_and_prove_nothing(load):
    seen, truth = sent(load("bert"), [TEXT], "all", defenses=(build("defense", "aegis", {}),))
    found = read(seen)
    assert found.sequences == tuple(map(tuple, truth))
    assert found.certificates == ("likely",)


@pytest.mark.parametrize(
    "texts",
    [
        ["the cold river opens", "a blue horse walks ."],
        ["the cold river opens", "the cold river closes"],  # but for one word
        ["the cold river", "the cold river opens"],  # one begins the other
    ],
)
def test_of_several_sentences_the_words_are_told_and_no_sentence(load, texts: list[str]):
    model = load("bert")
    seen, truth = sent(model, texts)
    found = read(seen)
    assert found.sequences == ()
    assert found.words is not None
    assert {word.token for word in found.words} == {t for s in truth for t in s} - model.special.ids
    assert all(word.certain for word in found.words)


def test_the_same_sentence_twice_is_that_sentence(load):
    seen, truth = sent(load("bert"), [TEXT, TEXT])
    assert read(seen).sequences == (tuple(truth[0]),)


def test_the_word_table_alone_tells_words(load):
    seen, truth = sent(load("bert"), [TEXT], "word")
    found = read(seen)
    assert found.sequences == ()
    assert {word.token for word in found.words or ()} == set(truth[0]) - seen.model.special.ids


@pytest.mark.parametrize(
    ("selection", "client"),
    [
        ("position", {}),
        ("embeddings", {"defenses": (build("defense", "gaussian", {"sigma": 1e-3}),)}),
        ("head", {}),
    ],
)
def test_where_the_tables_do_not_tell_it_says_what_is_needed(load, selection, client):
    seen, _ = sent(load("bert"), [TEXT], selection, **client)
    with pytest.raises(NotSupportedError, match="or the word table"):
        read(seen)


def test_a_tied_table_whose_rows_the_output_moves_tells_nothing(load):
    seen, _ = sent(load("gpt2", "causal-lm"), [TEXT])
    assert sentence_of_tables(seen) is None


def test_nothing_is_proven_where_another_matrix_is_fuller_than_the_sentence_makes_it(load):
    seen, truth = sent(load("bert"), [TEXT], "embeddings 1:o")
    assert read(seen).certificates == ("proven",)
    name = next(name for name in seen.tensors if "attention" in name or name.endswith(".o"))
    noise = torch.randn(seen.tensors[name].shape, generator=torch.Generator().manual_seed(0))
    found = read(replace(seen, tensors={**seen.tensors, name: noise}))
    assert found.sequences == tuple(map(tuple, truth))
    assert found.certificates == ("likely",)
    assert found.notes[-1].startswith("nothing is proven")


@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("sgd", learning_rate=0.1, epochs=2), ADAMW])
def test_no_proven_sentence_is_wrong_where_a_batch_is_nearly_alike(load, training: LocalTraining):
    draw, model = random.Random(5), load("bert")
    proven = 0
    for _ in range(40):
        words = draw.choices(WORDS, k=draw.randint(1, 8))
        other = list(words)
        match draw.randrange(4):
            case 0:
                other[draw.randrange(len(other))] = draw.choice(WORDS)
            case 1:
                draw.shuffle(other)
            case 2:
                other.append(words[0])
        texts = [" ".join(words), " ".join(other)]
        seen, truth = sent(model, texts, training=training, dropout=draw.random() < 0.5)
        found = sentence_of_tables(seen)
        if found is not None and found.certificates == ("proven",):
            proven += 1
            assert found.sequences[0] in set(map(tuple, truth))
    assert proven  # the same sentence twice, at least
