"""One sentence's words put in order from a compressed or noisy gradient."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.leakage.decoding.order import arrange, likely_places, likenesses, order_words
from gradaudit.leakage.rowspace.deflation import matrices
from gradaudit.leakage.rowspace.subspace import stack
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given

pytestmark = pytest.mark.minilm


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


KEY, OWES = "My key lies under the third pot.", "Rufus owes Clara nine euros since May."


def seen_of(model, text: str, name: str, fields: dict, dropout: bool = False):
    batch = make_batch(model, [text], [1])
    client = Client(model, dropout=dropout, defenses=(build("defense", name, fields),))
    return batch, tiny_models.seen_of(client, batch, "0-2:q,k,v", Given(), 0)


@pytest.mark.parametrize("dropout", [False, True])
def test_a_word_lies_above_the_noise_at_its_own_position_alone(minilm, dropout):
    batch, seen = seen_of(minilm, KEY, "gaussian", {"sigma": 0.1, "relative": True}, dropout)
    stacked, _ = stack(seen, 0)
    assert stacked is not None
    inner = list(batch.sequences()[0])[1:-1]
    assert len(set(inner)) == len(inner), "the closed form is for words that occur once"
    shuffled = [inner[i] for i in torch.randperm(len(inner), generator=torch.Generator().manual_seed(0)).tolist()]
    assert shuffled != inner
    assert arrange(likely_places(minilm, stacked, shuffled, range(1, len(inner) + 1)), shuffled) == inner


def test_every_word_gets_a_place_before_one_is_repeated():
    like = torch.tensor([[0.9, 0.8, 0.7, 0.8], [0.5, 0.6, 0.1, 0.2], [0.1, 0.2, 0.4, 0.39]])
    assert arrange(like, [7, 8, 9]) == [7, 8, 9, 9]


@pytest.mark.parametrize(
    ("name", "fields", "evaluations"),
    [
        ("sign", {}, 400),
        ("gaussian", {"sigma": 0.5, "relative": True}, 30),
        ("quantize", {"bits": 8}, 30),
        ("quantize", {"bits": 16}, 30),
    ],
)
def test_one_sentence_comes_back_in_order_through_a_defense_and_is_a_guess(minilm, name, fields, evaluations):
    batch, seen = seen_of(minilm, KEY, name, fields)
    found = Decode(order_evaluations=evaluations)(seen, stream(0, "attack"))
    assert found.sequences == (tuple(batch.sequences()[0]),)
    assert found.certificates == ("guess",)
    assert found.labels == (1,)


def test_the_right_sentence_is_the_likest_of_those_one_change_away(minilm):
    batch, seen = seen_of(minilm, KEY, "sign", {})
    sent, right = matrices(seen, 3), tuple(batch.sequences()[0])
    others = []
    for at in range(1, len(right) - 2):
        others += [(*right[:at], right[at + 1], right[at], *right[at + 2 :]), (*right[:at], *right[at + 1 :])]
    best, *rest = likenesses(minilm, [right, *others], 1, sent)
    assert max(rest) < best
    assert likenesses(minilm, [right], 0, sent)[0] < best


def test_another_gradient_orders_its_own_words_not_these(minilm):
    batch, _ = seen_of(minilm, KEY, "sign", {})
    _, other = seen_of(minilm, OWES, "sign", {})
    stacked, _ = stack(other, 0)
    assert stacked is not None
    words = list(dict.fromkeys(batch.sequences()[0][1:-1]))
    found = order_words(minilm, stacked, matrices(other, 3), words, 60, torch.Generator().manual_seed(0))
    assert found.tokens != tuple(batch.sequences()[0])
    assert found.likeness < 0.3


@pytest.mark.parametrize("wrong", [-2, 0, 2])
def test_a_length_that_was_given_is_kept(minilm, wrong):
    batch, seen = seen_of(minilm, KEY, "gaussian", {"sigma": 1e-4})
    stacked, _ = stack(seen, 0)
    assert stacked is not None
    words = list(dict.fromkeys(batch.sequences()[0][1:-1]))
    length = len(batch.sequences()[0]) + wrong
    rng = torch.Generator().manual_seed(0)
    found = order_words(minilm, stacked, matrices(seen, 3), words, 40, rng, length)
    assert len(found.tokens) == length
