"""Sentences from marks in trained embeddings: annealing finds what was planted, and real marks place words."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.leakage.uneven.marks import arranged, marks_of, sentences_of
from gradaudit.leakage.uneven.words import read_words
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.streams import stream
from gradaudit.types import Batch, LocalTraining, Observation
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


def read(seen: Observation, words, size: int = 4) -> list[tuple[int, ...]]:
    """Return the sentences of both steps."""
    marks = marks_of(seen)
    assert marks is not None
    return [one for step in (0, 1) for one in sentences_of(seen, marks, words, step, size, stream(0, "attack"))]


def change(model) -> tuple[Observation, Batch]:
    batch = make_batch(model, TEXTS, [0, 1] * 4)
    return seen_of(Client(model, STEPS, dropout=True), batch, "all"), batch


def test_annealing_finds_a_planted_arrangement():
    rng = torch.Generator().manual_seed(0)
    places = [(sentence, position) for sentence in range(4) for position in range(6)]
    by_place, together = -np.ones((24, 4, 6)), -np.ones((24, 24))
    for word, (sentence, position) in enumerate(places):
        by_place[word, :, position] = 1
        together[word] = [float(sentence == other) for other, _ in places]
    np.fill_diagonal(together, 0)
    total, found = arranged(by_place, together, rng)
    assert [position for _, position in found] == [position for _, position in places]
    assert len({(one[0], other[0]) for one, other in zip(found, places, strict=True)}) == 4, "one for one"
    assert total == pytest.approx(24 + 4 * 15)


def test_the_likelihood_counts_what_the_places_say():
    """Moves keep running sums; what they end in is the sum over the places themselves."""
    drawn = np.random.default_rng(0)
    by_place, together = drawn.normal(size=(10, 3, 5)), drawn.normal(size=(10, 10))
    together = np.triu(together, 1) + np.triu(together, 1).T
    total, found = arranged(by_place, together, torch.Generator().manual_seed(1))
    assert len(set(found)) == 10
    again, kept = arranged(by_place, together, torch.Generator().manual_seed(2), found)
    assert len(set(kept)) == 10
    assert again > total - 3
    one = sum(by_place[word, sentence, position] for word, (sentence, position) in enumerate(found))
    both = sum(together[a, b] for a in range(10) for b in range(a) if found[a][0] == found[b][0])
    assert total == pytest.approx(one + both)


def test_words_of_two_steps_come_back_in_order_and_with_those_beside_them(minilm):
    seen, batch = change(minilm)
    texts = [set(text[1:-1]) for text in batch.sequences()]
    at = {token: place for text in batch.sequences() for place, token in enumerate(text)}
    words = read_words(seen)
    assert words is not None
    found = read(seen, words)
    pairs = [pair for one in found for pair in pairwise(one[1:-1])]
    assert len(pairs) > 30
    assert sum(at[a] < at[b] for a, b in pairs) > 0.7 * len(pairs), "half by chance"
    assert sum(any({a, b} <= text for text in texts) for a, b in pairs) > 0.5 * len(pairs), "a quarter by chance"


def test_marks_of_other_words_place_nothing(minilm):
    """Swap control: each word has the mark of another one."""
    seen, batch = change(minilm)
    at = {token: place for text in batch.sequences() for place, token in enumerate(text)}
    words = read_words(seen)
    assert words is not None
    name = minilm.group("word")[0]
    ids = torch.tensor([word.token for word in words])
    other = replace(seen, tensors={**seen.tensors, name: seen.tensors[name].clone()})
    other.tensors[name][ids] = seen.tensors[name][ids.roll(7)]
    found = read(other, words)
    pairs = [pair for one in found for pair in pairwise(one[1:-1])]
    assert sum(at[a] < at[b] for a, b in pairs) < 0.6 * len(pairs)


def test_without_positions_words_come_without_order(minilm):
    seen, _ = change(minilm)
    few = {name: t for name, t in seen.tensors.items() if name not in minilm.group("position")}
    seen = replace(seen, tensors=few)
    assert marks_of(seen) is None
    found = Decode()(seen, stream(0, "attack"))
    assert len(found.sequences) == 2
    assert all(list(one[1:-1]) == sorted(one[1:-1]) for one in found.sequences)
    assert "no order" in found.notes[0]


def test_what_a_bundle_says_of_its_size_is_not_believed(minilm):
    seen, _ = change(minilm)
    words = (read_words(seen) or ())[:16]
    assert len(words) == 16
    found = read(seen, words, 10**9)
    assert all(len(one) <= minilm.max_length for one in found)
    assert sum(map(len, found)) <= 4 * len(words)


def test_several_steps_end_in_guesses_of_sentences(minilm):
    seen, _ = change(minilm)
    found = Decode()(seen, stream(0, "attack"))
    assert 4 < len(found.sequences) <= 8
    assert set(found.certificates) == {"guess"}
