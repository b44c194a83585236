"""Sentences from marks in trained embeddings: annealing finds what was planted, and real marks place words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.leakage.uneven.marks import arranged, sentences_of
from gradaudit.leakage.uneven.words import read_words
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.streams import stream
from gradaudit.types import LocalTraining, Observation
from tiny_models import seen_of

TEXTS = [
    "The nurse called Miriam at nine.", "A train to Lisbon left very late.", "His letter never reached Oslo again.",
    "Nobody paid that invoice in March.", "Red apples grow behind our house.", "Why did Peter sell every boat?",
    "Snow fell on both mountains today.", "My cousin plays chess with Anna.",
]  # fmt: skip
STEPS = LocalTraining("adamw", 5e-5, weight_decay=0.01, minibatch=4, clip_norm=1.0, schedule="linear")


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


def change(model, frozen: bool = False) -> tuple[Observation, list[tuple[int, ...]]]:
    batch = make_batch(model, TEXTS, [0, 1] * 4)
    seen = seen_of(Client(model, STEPS, dropout=True), batch, "all")
    if frozen:
        position = model.group("position")[0]
        seen = Observation(
            seen.model, {k: v for k, v in seen.tensors.items() if k != position}, seen.knowledge, seen.kind
        )
    return seen, batch.sequences()


def test_annealing_finds_a_planted_arrangement():
    rng = torch.Generator().manual_seed(0)
    places = [(sentence, position) for sentence in range(4) for position in range(6)]
    by_place, together = -np.ones((24, 6)), -np.ones((24, 24))
    for word, (sentence, position) in enumerate(places):
        by_place[word, position] = 1
        together[word] = [float(sentence == other) for other, _ in places]
    np.fill_diagonal(together, 0)
    total, found = arranged(by_place, together, 4, rng)
    assert [position for _, position in found] == [position for _, position in places]
    assert len({(one[0], other[0]) for one, other in zip(found, places, strict=True)}) == 4, "one for one"
    assert total == pytest.approx(24 + 4 * 15)


def test_the_likelihood_counts_what_the_places_say():
    """Moves keep running sums; what they end in is the sum over the places themselves."""
    drawn = np.random.default_rng(0)
    by_place, together = drawn.normal(size=(10, 5)), drawn.normal(size=(10, 10))
    together = np.triu(together, 1) + np.triu(together, 1).T
    total, found = arranged(by_place, together, 3, torch.Generator().manual_seed(1))
    assert len(set(found)) == 10
    one = sum(by_place[word, position] for word, (_, position) in enumerate(found))
    both = sum(together[a, b] for a in range(10) for b in range(a) if found[a][0] == found[b][0])
    assert total == pytest.approx(one + both)


def test_words_of_two_steps_come_near_their_positions(minilm):
    seen, truth = change(minilm)
    words = read_words(seen)
    assert words is not None
    right = wrong = 0
    for step in (0, 1):
        at = {token: place for text in truth[4 * step : 4 * step + 4] for place, token in enumerate(text)}
        found = sentences_of(seen, words, step, 4, stream(0, "attack"))
        assert found is not None
        assert len(found) <= 4
        for sentence in found:
            inner = sentence[1:-1]
            right += sum(at[a] < at[b] for a, b in zip(inner, inner[1:], strict=False) if a in at and b in at)
            wrong += sum(at[a] > at[b] for a, b in zip(inner, inner[1:], strict=False) if a in at and b in at)
    assert right > 2 * wrong, "by chance as many"


def test_without_positions_words_come_in_the_order_of_their_ids(minilm):
    seen, _ = change(minilm, frozen=True)
    found = Decode()(seen, stream(0, "attack"))
    assert len(found.sequences) == 2
    assert all(list(one[1:-1]) == sorted(one[1:-1]) for one in found.sequences)
    assert "no order" in found.notes[0]


def test_several_steps_end_in_guesses_of_sentences(minilm):
    seen, _ = change(minilm)
    found = Decode()(seen, stream(0, "attack"))
    assert 4 < len(found.sequences) <= 8
    assert set(found.certificates) == {"guess"}
