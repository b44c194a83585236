"""Where the row space holds each sentence: directions to which the rows of all others are orthogonal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradaudit.leakage.decoding.dropout_masks import refine_masks, relaxed_masks
from gradaudit.leakage.decoding.sentence_spaces import Open, SentenceSpace, costs

HEADS, SIZE, WIDTH = 6, 32, 192


def batch(lengths: list[int], seed: int, alike: int = 1) -> SimpleNamespace:
    """Return masked rows, their queries and keys, what attention sends back, and which sentence each is of.

    So many sentences, one after the other, have the same words, each with masks of its own.
    """
    rng = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.double)

    count = sum(lengths)
    clean, kept = drawn(count, WIDTH), torch.rand(count, WIDTH, generator=rng) >= 0.1
    if alike > 1:
        first = [n - n % alike for n in range(len(lengths))]
        clean = clean.view(len(lengths), -1, WIDTH)[first].flatten(0, 1)
    rows = clean * kept
    queries, keys = ((rows @ drawn(WIDTH, WIDTH)).view(count, HEADS, SIZE) for _ in range(2))
    received, of = torch.zeros(count, 2, HEADS, SIZE, dtype=torch.double), torch.zeros(count, dtype=torch.long)
    start = 0
    for n, length in enumerate(lengths):
        some = slice(start, start + length)
        of[some] = n
        passed = drawn(HEADS, length, length)
        passed -= passed.mean(2, keepdim=True)  # the softmax ignores a shift
        received[some, 0] = torch.einsum("hij,jhd->ihd", passed, keys[some])
        received[some, 1] = torch.einsum("hij,ihd->jhd", passed, queries[some])
        start += length
    return SimpleNamespace(clean=clean, kept=kept, rows=rows, queries=queries, keys=keys, received=received, of=of)


def space(made: SimpleNamespace, sentence: int, known: Tensor, keys_of: int | None = None) -> SentenceSpace:
    """Return the space of a sentence where some rows are known; with the keys and queries of another for a control."""
    basis = torch.linalg.svd(made.rows, full_matrices=False).Vh.T
    found = made.rows[known]
    beside = basis @ torch.linalg.svd(found @ basis, full_matrices=True).Vh[len(found) :].T
    gradient = torch.einsum("bphd,bw->phdw", made.received, made.rows)
    own = torch.where(made.of[known] == sentence)[0]
    directions = torch.cat([torch.linalg.pinv(found)[:, own], beside], 1)
    received = torch.einsum("phdw,wz->zphd", gradient, directions)
    there = known & (made.of == (sentence if keys_of is None else keys_of))
    length = int((made.of == sentence).sum())
    return SentenceSpace.of(received, directions, made.keys[there], made.queries[there], length)


@pytest.mark.parametrize("sentence", range(3))
def test_rows_of_others_have_nothing_of_a_sentences_directions(sentence: int):
    made = batch([6, 9, 7], seed=0)
    known = torch.ones(22, dtype=torch.bool)
    known[[2, 8, 12, 18]] = False
    known[made.of == sentence] = True
    found = space(made, sentence, known)
    length = int((made.of == sentence).sum())
    assert float(found.lost[:length].max()) < 1e-9
    assert float(found.lost[length]) > 0.05
    share = (made.rows @ found.directions[:, :length]) * made.received.flatten(1).norm(dim=1)[:, None]
    own = made.of == sentence
    assert float(share[~own].abs().max()) < 1e-5 * float(share[own].abs().max())


def test_keys_of_another_sentence_explain_nothing():
    made = batch([6, 9, 7], seed=1)
    known = torch.ones(22, dtype=torch.bool)
    known[[2, 8, 12, 18]] = False
    assert float(space(made, 0, known, keys_of=2).lost[0]) > 0.01
    assert float(space(made, 1, known, keys_of=2).lost[0]) > 0.01


def test_rows_decode_where_the_other_sentences_leave_them_and_not_in_the_whole_row_space():
    made = batch([8] * 17, seed=2, alike=4)  # 136 tokens on 192 coordinates
    known = torch.rand(136, generator=torch.Generator().manual_seed(3)) < 0.7
    basis = torch.linalg.svd(made.rows, full_matrices=False).Vh.T.contiguous()
    inputs: Any = SimpleNamespace(basis=basis, shifts=torch.zeros(0, WIDTH, dtype=torch.double))
    spaces = [space(made, n, known) for n in range(17)]
    size = float(made.received.flatten(1).square().sum(1).median() * made.rows.square().mean())
    outside = torch.eye(WIDTH, dtype=torch.double) - basis @ basis.T
    plain = leaning = 0
    for n, cost in enumerate(costs(inputs, spaces, size, 0)):
        wanted = torch.where((made.of == n) & ~known)[0]
        clean, kept = made.clean[wanted], made.kept[wanted]
        by = torch.linalg.inv(torch.eye(136, dtype=torch.double) + cost)
        before, after = (
            refine_masks(outside, clean, relaxed_masks(basis, clean, leaning=one) > 0.5)[0] for one in (None, by)
        )
        plain += int((before == kept).all(1).sum())
        leaning += int((after == kept).all(1).sum())
    assert int((~known).sum()) == 35
    assert plain <= 6
    assert leaning >= 12


def test_keys_explain_what_sums_to_zero_alone():
    made = batch([5], seed=4)
    received = torch.zeros(2, 2, HEADS, SIZE, dtype=torch.double)
    received[0, 0] = made.keys[0] - made.keys[1]  # the softmax can
    received[1, 0] = made.keys.sum(0)  # and cannot
    found = SentenceSpace.of(received, torch.eye(2, dtype=torch.double), made.keys, made.queries, 5)
    assert float(found.lost[0]) < 1e-9
    assert float(found.lost[1]) > 0.5
    assert abs(float(found.directions[1, 0])) < 1e-6 * abs(float(found.directions[0, 0]))


def test_rows_are_looked_for_where_none_was_decoded():
    nothing = torch.zeros(0)
    assert Open(frozenset({0, 2, 3}), True, nothing).places(50) == [1]
    assert Open(frozenset({0, 2, 3}), False, nothing).places(50) == [1, 4, 5, 6]
    assert Open(frozenset({0, 2, 3}), False, nothing).places(5) == [1, 4]
    assert Open(frozenset(), False, nothing).places(50) == [0, 1, 2, 3]
