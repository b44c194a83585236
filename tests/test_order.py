"""One sentence's words put in order from a compressed or noisy gradient."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.leakage.decoding import order
from gradaudit.leakage.decoding.order import Places, arrange, likely_places, likenesses, order_words
from gradaudit.leakage.rowspace.deflation import matrices, sentence_gradients
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
    ("name", "fields", "evaluations"), [("sign", {}, 400), ("gaussian", {"sigma": 1.5, "relative": True}, 30)]
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


FAUCET = "That annoying faucet was dripping constantly for months."


def test_with_dropout_on_the_places_of_words_outweigh_a_likelier_sentence(minilm, monkeypatch):
    """Dropout makes longer sentences likelier than the right one; their words lie off their places."""
    batch, seen = seen_of(minilm, FAUCET, "normalized-gaussian", {"sigma": 1e-3}, dropout=True)
    right = tuple(batch.sequences()[0])
    found = Decode(order_evaluations=64)(seen, stream(0, "attack"))
    assert found.sequences == (right,)
    assert found.certificates == ("guess",)
    monkeypatch.setattr(order, "_PLACED", 0.0)
    other = Decode(order_evaluations=64)(seen, stream(0, "attack"))
    assert other.details["likeness"] > found.details["likeness"]
    assert other.sequences != (right,)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_gradients_of_several_sentences_are_those_of_each_alone(folders, name):
    """Oracle: a backward pass of one sentence, unpadded."""
    model = load_model(ModelSpec(f"random:{folders[name]}"))
    texts = [tuple(ids) for ids in tiny_models.batch_of(model, tiny_models.sentences([3, 6], 1)).sequences()]
    like = {(layer, role): torch.zeros(1) for layer in (0, 1) for role in "qkv"}
    found = sentence_gradients(model, texts, 1, like)
    for at, text in enumerate(texts):
        ids = torch.tensor([text])
        loss = model.loss(ids=ids, mask=torch.ones_like(ids), labels=torch.tensor([1]))
        views = {key: model.views(*key)[0] for key in like}
        parameters = [model.parameters()[view.parameter] for view in views.values()]
        for (key, view), grad in zip(views.items(), torch.autograd.grad(loss, parameters), strict=True):
            assert torch.allclose(found[key][at], view(grad), atol=1e-6, rtol=1e-4)


def test_a_word_of_the_vocabulary_is_tried_where_none_that_stands_out_has_its_place(minilm):
    batch, seen = seen_of(minilm, KEY, "sign", {})
    stacked, _ = stack(seen, 0)
    assert stacked is not None
    inner = list(batch.sequences()[0])[1:-1]
    words = [*inner[:3], *inner[4:]]
    places = Places(minilm, stacked, words, 12)
    assert places.length() == len(inner)
    assert inner in places.others([*inner[:3], inner[0], *inner[4:]])
    assert not list(Places(minilm, stacked, inner, 12).others(inner))
    assert places.fit(inner) == pytest.approx(0.0, abs=1e-4)
    assert places.fit([inner[1], inner[0], *inner[2:]]) < -0.005


def test_a_sentence_that_rows_made_is_started_from(minilm):
    batch, seen = seen_of(minilm, KEY, "sign", {})
    stacked, _ = stack(seen, 0)
    assert stacked is not None
    sent, right = matrices(seen, 3), tuple(batch.sequences()[0])
    rng = torch.Generator().manual_seed(0)
    words = list(right[1:5])
    assert order_words(minilm, stacked, sent, words, 0, rng).tokens != right
    assert order_words(minilm, stacked, sent, words, 0, rng, beside=[right]).tokens == right


def test_more_words_than_a_decoder_has_positions_are_cut(folders):
    model = load_model(ModelSpec(f"random:{folders['gpt2']}"))
    batch = tiny_models.batch_of(model, tiny_models.sentences([4], 1))
    seen = tiny_models.seen_of(Client(model), batch)
    stacked, _ = stack(seen, 0)
    assert stacked is not None
    words = [20 + at % 40 for at in range(model.max_length + 4)]
    found = order_words(model, stacked, matrices(seen, 2), words, 0, torch.Generator().manual_seed(0))
    assert len(found.tokens) <= model.max_length
