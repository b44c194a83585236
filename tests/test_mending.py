"""Sentences mended in the span of block 1: by all words near block 0's span, and never by cutting them short."""

from __future__ import annotations

import pytest
import torch

import gradaudit.leakage.decoding.assembly as assembly_file
import gradaudit.leakage.decoding.mending as mending_file
import tiny_models
from gradaudit.client.client import Client
from gradaudit.leakage.decoding.mending import descend, misfit, own_distances
from gradaudit.leakage.decoding.pairs import Pairs, candidate_pairs
from gradaudit.leakage.rowspace.deflation import matrices, remainder
from gradaudit.leakage.rowspace.subspace import Span, span
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.types import Given
from made_data import sample_batch

pytestmark = pytest.mark.minilm


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


@pytest.fixture(scope="module")
def given(minilm) -> tuple[list[tuple[int, ...]], Span, Pairs]:
    """Two sentences of the sample, block 1's span of their gradient, and the pairs near block 0's."""
    batch = sample_batch(minilm, 8, 2)
    seen = tiny_models.seen_of(Client(minilm), batch, "0-1:q,k,v", Given(), 3)
    first, second = span(seen, 0), span(seen, 1)
    assert first is not None
    assert second is not None
    return [tuple(s) for s in batch.sequences()], second, candidate_pairs(minilm, first, 40)


def at(pairs: Pairs, position: int, token: int) -> torch.Tensor:
    return (pairs.positions == position) & (pairs.tokens == token)


def test_a_word_put_alone_into_a_sentence_has_the_row_that_it_has_in_it(minilm, given):
    (sentence, _), second, near = given
    far = own_distances(minilm, second, near, sentence)
    for n in range(0, len(near), 7):
        position, token = int(near.positions[n]), int(near.tokens[n])
        if position < len(sentence):
            exchanged = (*sentence[:position], token, *sentence[position + 1 :])
            rows = minilm.attention_inputs(1, torch.tensor([exchanged]))
            assert float(far[n]) == pytest.approx(float(second.residual(rows)[0, position]), abs=1e-5)
        else:
            assert float(far[n]) == 1


def test_a_word_is_exchanged_for_one_that_is_near(minilm, given):
    (sentence, _), second, near = given
    wrong = (*sentence[:3], sentence[5], *sentence[4:])
    linked = near.pick(~at(near, 3, sentence[3]))
    assert descend(minilm, second, near, wrong)[0] == sentence
    found, left = descend(minilm, second, linked, wrong)  # the control: where it is not near, it is not
    assert found != sentence
    assert float(left.square().mean()) > 1


def test_a_sentence_is_not_cut_short_for_the_few_rows_that_are_left_to_be_wrong(minilm, given):
    (sentence, _), second, _ = given
    wrong = (*sentence[:4], *reversed(sentence[4:-1]), sentence[-1])
    early = torch.arange(1, len(sentence) - 1)
    ends = Pairs(early, torch.full_like(early, sentence[-1]), torch.zeros(len(early), minilm.width).double())
    cuts = [(*wrong[:n], sentence[-1]) for n in range(1, len(wrong) - 1)]
    far = float(misfit(minilm, second, [wrong])[1])
    assert min(misfit(minilm, second, cuts)[1].tolist()) < far, "the shorter ones are no nearer: nothing is shown"
    assert descend(minilm, second, ends, wrong)[0] == wrong


def test_a_sentence_that_went_on_too_far_ends_where_it_fits(minilm, given):
    (sentence, _), second, near = given
    longer = (*sentence[:-1], sentence[4], sentence[-1])
    assert descend(minilm, second, near, longer)[0] == sentence
    shorter = (*sentence[:-2], sentence[-1])
    assert descend(minilm, second, near, shorter)[0] == sentence


def test_a_word_that_would_go_on_is_judged_with_the_end_behind_it(minilm, given, monkeypatch):
    """Attention looks at the end: without it a right word's own row is off (on MPNet by half of its length)."""
    (sentence, _), second, near = given
    last = len(sentence) - 2
    short, right = (*sentence[:last], sentence[-1]), near.pick(at(near, last, sentence[last]))
    assert float(own_distances(minilm, second, right, short)) > 1e-3
    assert float(own_distances(minilm, second, right, (*short, sentence[-1]))) < 1e-5
    asked = []

    def remembered(model, span, pairs, among):
        asked.append((len(pairs.positions.unique()), among))
        return own_distances(model, span, pairs, among)

    monkeypatch.setattr(mending_file, "own_distances", remembered)
    assert descend(minilm, second, near, short)[0] == sentence
    assert (1, (*short, sentence[-1])) in asked


def test_words_that_send_too_little_to_be_linked_are_still_tried(minilm, monkeypatch):
    monkeypatch.setattr(assembly_file, "_MOST", 0.7)
    batch = sample_batch(minilm, 8, 2)
    first, second = (tuple(s) for s in batch.sequences())
    seen = tiny_models.seen_of(Client(minilm), batch, "0-2:q,k,v", Given(), 3)
    left = matrices(seen, 3)
    pairs = candidate_pairs(minilm, remainder(left, 1e-7).span(0), 40)
    placed = assembly_file.place(minilm, remainder(left, 1e-7), remainder(left, 1e-7).span(0), pairs)
    assert len(placed.pairs) < len(first) + len(second)
    assert len(placed.near) == len(pairs)
    solved, guesses, _ = assembly_file.solve(minilm, left, 1e-7, 2, 40)
    assert {one.tokens for one in solved} == {first, second}
    assert not guesses
