"""Placing words: the sparsest signals against problems made here, and labels by explaining a gradient."""

from __future__ import annotations

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.leakage.decoding.explain import explain
from gradaudit.leakage.decoding.pairs import Pairs, candidate_pairs, placed_signals, sparse_signals
from gradaudit.leakage.rowspace.deflation import matrices, remainder, sentence_gradient
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from tiny_models import batch_of, seen_of, sentences


def test_the_sparsest_signals_are_the_ones_that_made_the_gradient():
    rng = torch.Generator().manual_seed(0)
    words, places = (torch.randn(n, 80, generator=rng, dtype=torch.double) for n in (8, 4))
    rows = (words[:, None] + places[None]).reshape(-1, 80)  # 32 candidates, all in the span of the right ones
    signals = torch.zeros(32, 90, dtype=torch.double)
    # word 0 stands at every place and links them; the others occur once
    right = [0, 1, 2, 3, *(4 * word + word % 4 for word in range(1, 8))]
    signals[right] = torch.randn(len(right), 90, generator=rng, dtype=torch.double)
    gradient = signals.T @ rows
    _, values, vh = torch.linalg.svd(gradient, full_matrices=False)
    basis = vh[: int((values > 1e-9 * values[0]).sum())].T
    found = sparse_signals(gradient, rows, basis)
    assert torch.allclose(found.T @ rows, gradient, atol=1e-6)
    assert sorted(found.norm(dim=1).topk(len(right)).indices.tolist()) == sorted(right)


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet"])
def test_every_pair_of_the_batch_is_a_candidate(load, family: str):
    model = load(family)
    batch = batch_of(model, sentences((4,), 2))
    rest = remainder(matrices(seen_of(Client(model), batch), 2), 1.2e-7)
    pairs = candidate_pairs(model, rest.span(0), 64)
    found = set(zip(pairs.positions.tolist(), pairs.tokens.tolist(), strict=True))
    assert {(p, t) for s in batch.sequences() for p, t in enumerate(s)} <= found


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_the_right_sentences_explain_the_gradient_with_their_labels_and_others_do_not(load, family: str):
    model = load(family)
    texts = sentences((3, 5), 1)
    batch = batch_of(model, texts, [1, 0])
    left = matrices(seen_of(Client(model), batch), 2)
    right = [tuple(s) for s in batch.sequences()]
    told = explain(model, right, left, 1 / 2)
    assert told.labels == (1, 0)
    assert told.left < 1e-4

    def norm(of) -> float:  # of a client's own update
        return sum(float(g.norm()) ** 2 for g in matrices(seen_of(Client(model), of), 2).values()) ** 0.5

    alone = [batch_of(model, [text], [label]) for text, label in zip(texts, (1, 0), strict=True)]
    assert told.parts == pytest.approx([norm(one) / 2 / norm(batch) for one in alone], rel=1e-3)
    for at in range(1, len(right[1]) - 1):
        other = next(t for t in range(5, 60) if t not in model.special.ids and t != right[1][at])
        changed = (*right[1][:at], other, *right[1][at + 1 :])
        assert explain(model, [right[0], changed], left, 1 / 2).left > 1e-3


def test_the_mean_of_two_sentences_own_gradients_is_the_batchs(load):
    model = load("bert")
    batch = batch_of(model, sentences((3, 5), 4), [0, 1])
    left = matrices(seen_of(Client(model), batch), 2)
    own = [sentence_gradient(model, tuple(s), y, left) for s, y in zip(batch.sequences(), (0, 1), strict=True)]
    for key, whole in left.items():
        assert torch.allclose((own[0][key] + own[1][key]) / 2, whole, atol=1e-6 + 1e-5 * float(whole.abs().max()))


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


Signals = dict[tuple[int, int], torch.Tensor]


def made_flows(model, words: list[list[int]], seed: int = 0) -> tuple[torch.Tensor, Pairs, Signals]:
    """Return a gradient of random signals, every word at every position as candidates, and the signal of each pair."""
    rng = torch.Generator().manual_seed(seed)
    right: Signals = {}
    for sentence in words:
        for position, token in enumerate(sentence):
            signal = torch.randn(900, generator=rng, dtype=torch.double)
            right[position, token] = right.get((position, token), torch.zeros_like(signal)) + signal
    gradient = sum(
        s[:, None] * model.first_inputs(p, torch.tensor([t])).double()[0][None] for (p, t), s in right.items()
    )
    tokens = sorted({t for s in words for t in s})
    every = [(p, t) for p in range(max(map(len, words))) for t in tokens]
    rows = torch.cat([model.first_inputs(p, torch.tensor([t])).double() for p, t in every])
    return gradient, Pairs(torch.tensor([p for p, _ in every]), torch.tensor([t for _, t in every]), rows), right


@pytest.mark.minilm
def test_words_that_occur_once_are_placed_exactly_whoever_shares_their_position(minilm):
    sentences = [[2000 + 20 * s + p for p in range(10 + s)] for s in range(6)]
    gradient, pairs, right = made_flows(minilm, sentences)
    found = placed_signals(minilm, gradient, pairs)
    assert found is not None
    for (p, t), signal in zip(zip(pairs.positions.tolist(), pairs.tokens.tolist(), strict=True), found, strict=True):
        wanted = right.get((p, t), torch.zeros_like(signal))
        assert float((signal - wanted).norm()) < 0.02 * 900**0.5, (p, t)


@pytest.mark.minilm
def test_a_word_that_splits_over_positions_is_found_at_all_of_them(minilm):
    sentences = [[2000 + 12 * s + p for p in range(10)] for s in range(5)]
    for s in range(5):
        sentences[s][2 + s] = 1996  # the same word, at another position of each sentence
    gradient, pairs, right = made_flows(minilm, sentences)
    placed = placed_signals(minilm, gradient, pairs)
    assert placed is not None
    strength = placed.norm(dim=1)
    top = strength.topk(len(right)).indices.tolist()
    assert {(int(pairs.positions[i]), int(pairs.tokens[i])) for i in top} == set(right)
    # and it explains the gradient
    assert float((placed.T @ pairs.rows - gradient).norm() / gradient.norm()) < 0.02


@pytest.mark.minilm
def test_more_words_and_positions_than_the_model_is_wide_are_not_placed(minilm):
    tokens = torch.arange(2000, 2390)
    pairs = Pairs(torch.zeros_like(tokens), tokens, minilm.first_inputs(0, tokens).double())
    assert placed_signals(minilm, torch.randn(50, 384, dtype=torch.double), pairs) is None
