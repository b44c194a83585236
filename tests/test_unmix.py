"""Two sentences through a coarse or noisy gradient: placed, linked, told apart by likelihood, never called proven."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.leakage.decoding.order import judged
from gradaudit.leakage.decoding.several import explained, place_words
from gradaudit.leakage.rowspace.deflation import matrices, sentence_gradient
from gradaudit.leakage.rowspace.subspace import stack
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given

pytestmark = pytest.mark.minilm

TEXTS = ["My key lies under the third pot.", "Rufus owes Clara nine euros since May."]


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


def seen_of(model, name: str, fields: dict):
    batch = make_batch(model, TEXTS, [1, 0])
    client = Client(model, defenses=(build("defense", name, fields),))
    return batch, tiny_models.seen_of(client, batch, "0-2:q,k,v", Given(), 0)


@pytest.mark.parametrize(("name", "fields"), [("sign", {}), ("gaussian", {"sigma": 1.0, "relative": True})])
def test_both_sentences_come_back_as_guesses(minilm, name: str, fields: dict):
    batch, seen = seen_of(minilm, name, fields)
    found = Decode(order_evaluations=80)(seen, stream(0, "attack"))
    assert set(found.sequences) == {tuple(s) for s in batch.sequences()}
    assert found.certificates == ("guess", "guess")


def test_words_are_placed_through_the_noise(minilm):
    batch, seen = seen_of(minilm, "gaussian", {"sigma": 0.1, "relative": True})
    stacked, roles = stack(seen, 0)
    assert stacked is not None
    right = {(p, t) for s in batch.sequences() for p, t in enumerate(s)}
    words = sorted({t for _, t in right} - minilm.special.ids)
    placed, _ = place_words(minilm, stacked, roles, words, 2)
    pairs = list(zip(placed.pairs.positions.tolist(), placed.pairs.tokens.tolist(), strict=True))
    assert len(right & set(pairs[: len(right)])) >= 0.9 * len(right)


def test_taking_a_sentence_off_leaves_what_the_other_sent(minilm):
    batch, seen = seen_of(minilm, "quantize", {"bits": 16})
    sent = matrices(seen, 3)
    first, second = (tuple(s) for s in batch.sequences())
    own = explained(minilm, judged(minilm, [first[1:-1]], 1, sent)[0], sent)
    left = {key: g - own[key] for key, g in sent.items()}
    other = sentence_gradient(minilm, second, 0, sent)
    cosine = torch.nn.functional.cosine_similarity
    for key, rest in left.items():
        assert float(cosine(rest.flatten(), other[key].flatten(), dim=0)) > 0.9
