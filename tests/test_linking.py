"""Linking: signals, supports and groups on attention gradients made here, where the sentences are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradaudit.leakage.decoding import linking

HEADS, SIZE = 6, 16


def made(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int], list[int]]:
    """Return signals of queries and keys, queries, keys, positions and the sentence of each token, shuffled."""
    rng = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    sentence = [s for s, n in enumerate(lengths) for _ in range(n)]
    position = [p for n in lengths for p in range(n)]
    q, k = (torch.randn(count, HEADS, SIZE, generator=rng, dtype=torch.double) for _ in range(2))
    same = torch.tensor(sentence)[:, None] == torch.tensor(sentence)[None]
    weights = torch.randn(HEADS, count, count, generator=rng, dtype=torch.double) * same
    weights = weights - same * weights.sum(2, keepdim=True) / same.sum(1)[:, None]  # the softmax ignores a shift
    toward_q = torch.einsum("hij,jhd->ihd", weights, k)
    toward_k = torch.einsum("hij,ihd->jhd", weights, q)
    order = torch.randperm(count, generator=rng).tolist()
    index = torch.tensor(order)
    return (
        toward_q[index],
        toward_k[index],
        q[index],
        k[index],
        [position[i] for i in order],
        [sentence[i] for i in order],
    )


@pytest.mark.parametrize("lengths", [[5, 7], [4, 6, 9, 5], [8, 8, 8, 8, 8, 8]])
def test_the_sentences_are_found(lengths: list[int]):
    toward_q, toward_k, q, k, positions, sentence = made(lengths)
    place = torch.tensor(positions)
    a, b = linking.joint_support(toward_q, k, place), linking.joint_support(toward_k, q, place)
    groups = linking.group(a + a.T + b + b.T, positions, len(lengths))
    assert sorted(len(g) for g in groups) == sorted(lengths)
    for members in groups:
        assert len({sentence[i] for i in members}) == 1
        assert [positions[i] for i in members] == list(range(len(members)))


@pytest.mark.parametrize("length", [6, 14, 24, 40, 100])  # a head is 16 wide
def test_a_sentence_explains_its_own_signals_and_no_sentence_with_one_stranger_does(length: int):
    toward_q, toward_k, q, k, positions, sentence = made([length, length, 6])
    own = torch.tensor([i for i, s in enumerate(sentence) if s == 0])
    assert float(linking.unexplained(toward_q, toward_k, q, k, own)[0].max()) < 1e-6
    for lost in own.tolist()[:8]:
        stranger = next(i for i, s in enumerate(sentence) if s == 1 and positions[i] == positions[lost])
        mixed = torch.tensor([stranger if i == lost else i for i in own.tolist()])
        assert float(linking.unexplained(toward_q, toward_k, q, k, mixed)[0].max()) > 0.05


def test_own_keys_alone_make_what_came_back_to_queries_and_no_others_do():
    toward_q, _, _, k, _, sentence = made([7, 7, 9])
    members = [torch.tensor([i for i, s in enumerate(sentence) if s == which]) for which in range(3)]
    for own in members:
        assert float(linking.unexplained_queries(toward_q, k, own).max()) < 1e-9
        stranger = torch.cat([own[1:], next(other for other in members if other is not own)[:1]])
        assert float(linking.unexplained_queries(toward_q, k, stranger).min()) > 0.05
    # not all sums of keys are made: what came back sums to zero
    shifted = toward_q + k[members[0]].mean(0)
    assert float(linking.unexplained_queries(shifted, k, members[0]).min()) > 0.01


def test_two_tokens_at_one_position_are_never_joined():
    closest = torch.ones(4, 4, dtype=torch.double)
    assert sorted(map(sorted, linking.group(closest, [0, 0, 1, 1], 2))) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    assert len(linking.group(closest, [3, 3, 3, 3], 1)) == 4


def test_both_sides_and_the_row_sums_are_asked():
    toward_q, toward_k, q, k, _, sentence = made([8, 9])
    own = torch.tensor([i for i, s in enumerate(sentence) if s == 0])
    rng = torch.Generator().manual_seed(1)
    for side in (0, 1):
        bent = [toward_q.clone(), toward_k.clone()]
        bent[side][own[3]] = torch.randn(HEADS, SIZE, generator=rng, dtype=torch.double)
        assert float(linking.unexplained(*bent, q, k, own)[0].max()) > 0.05
    # attention that does not sum to zero over a row: no softmax sends it back
    weights = torch.randn(HEADS, len(own), len(own), generator=rng, dtype=torch.double)
    toward_q[own] = torch.einsum("hij,jhd->ihd", weights, k[own])
    toward_k[own] = torch.einsum("hij,ihd->jhd", weights, q[own])
    assert float(linking.unexplained(toward_q, toward_k, q, k, own)[0].max()) > 0.05


@pytest.mark.parametrize("missing", [1, 3])
def test_the_signals_of_missing_rows_are_solved_for(missing: int):
    toward_q, toward_k, q, k, _, sentence = made([8, 9, 7])
    rng = torch.Generator().manual_seed(2)
    hidden = tuple(torch.randn(missing, HEADS, SIZE, generator=rng, dtype=torch.double) for _ in range(2))
    part = torch.randn(len(sentence), missing, generator=rng, dtype=torch.double)
    toward_q = toward_q + torch.einsum("nq,qhd->nhd", part, hidden[0])
    toward_k = toward_k + torch.einsum("nq,qhd->nhd", part, hidden[1])
    own = torch.tensor([i for i, s in enumerate(sentence) if s == 1])
    assert float(linking.unexplained(toward_q, toward_k, q, k, own)[0].max()) > 0.05, "without them nothing is proven"
    left, foreign = linking.unexplained(toward_q, toward_k, q, k, own, (hidden[0], hidden[1]))
    assert float(left.max()) < 1e-6
    assert torch.allclose(foreign, part[own], atol=1e-6)


@pytest.mark.parametrize("count", [3, 16, 17, 20, 60])
def test_conditions_are_counted_as_the_rank_leaves_them(count: int):
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(count, SIZE, generator=rng, dtype=torch.double) for _ in range(2))
    k = torch.cat([k, torch.ones(count, 1, dtype=torch.double)], 1)
    spans = torch.linalg.matrix_rank(k @ k.T), torch.linalg.matrix_rank(q @ q.T)
    free = (count - int(spans[0])) * (count - int(spans[1]))
    equations = count * (SIZE + 1) + count * SIZE
    assert linking.conditions(count, 5, SIZE) == 5 * (equations - (count**2 - free))


@pytest.mark.parametrize("length", [5, 9, 24])  # a head is 16 wide
def test_missing_rows_signals_of_very_different_sizes_are_told_as_by_orthogonal_factors(length: int):
    toward_q, toward_k, q, k, _, sentence = made([length, 7])
    own = torch.tensor([i for i, s in enumerate(sentence) if s == 0])
    rng = torch.Generator().manual_seed(3)
    sizes = torch.logspace(-3, 1, 4, dtype=torch.double)[:, None, None]
    hidden = (torch.randn(4, HEADS, SIZE, generator=rng).double() * sizes,
              torch.randn(4, HEADS, SIZE, generator=rng).double() * sizes)  # fmt: skip
    # signals that nothing explains: what is told is the nearest
    toward_q = toward_q + 0.1 * torch.randn(toward_q.shape, generator=rng).double()
    left, told = linking.unexplained(toward_q, toward_k, q, k, own, hidden)

    # the oracle: all of attention's and the contamination's unknowns at once, column by column
    keys, queries = q.new_zeros(HEADS, length, SIZE + 1), q[own].permute(1, 0, 2)
    keys[:, :, :SIZE] = k[own].permute(1, 0, 2)
    scale_k, scale_q = (t[own].permute(1, 0, 2).flatten(1).norm(dim=1) for t in (k, q))
    keys[:, :, :SIZE] /= scale_k[:, None, None]
    keys[:, :, SIZE] = length**-0.5
    queries = queries / scale_q[:, None, None]
    columns = []
    for head in range(HEADS):
        for i in range(length):
            for j in range(length):
                at_q, at_k = torch.zeros(HEADS, length, SIZE + 1), torch.zeros(HEADS, length, SIZE)
                at_q, at_k = at_q.double(), at_k.double()
                at_q[head, i], at_k[head, j] = keys[head, j], queries[head, i]
                columns.append(torch.cat([at_q.flatten(), at_k.flatten()]))
    for i in range(length):
        for one, other in zip(*hidden, strict=True):
            at_q, at_k = torch.zeros(HEADS, length, SIZE + 1).double(), torch.zeros(HEADS, length, SIZE).double()
            at_q[:, i, :SIZE], at_k[:, i] = one / scale_k[:, None], other / scale_q[:, None]
            columns.append(torch.cat([at_q.flatten(), at_k.flatten()]))
    sides = torch.zeros(HEADS, length, SIZE + 1).double()
    sides[:, :, :SIZE] = toward_q[own].permute(1, 0, 2) / scale_k[:, None, None]
    other = toward_k[own].permute(1, 0, 2) / scale_q[:, None, None]
    matrix, target = torch.stack(columns, 1), torch.cat([sides.flatten(), other.flatten()])
    exact = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    shares = exact[-4 * length :].view(length, 4)
    assert float(((told - shares) / shares).abs().max()) < 1e-6
    rest = (target - matrix @ exact).split([sides.numel(), other.numel()])
    by_member = [part.view(HEADS, length, -1).square().sum((0, 2)) for part in rest]
    without = target - matrix[:, -4 * length :] @ exact[-4 * length :]
    whole = [p.view(HEADS, length, -1).square().sum((0, 2)) for p in without.split([sides.numel(), other.numel()])]
    assert torch.allclose(left, (sum(by_member) / sum(whole)).sqrt(), rtol=1e-6)


def test_directions_that_depend_on_each_other_leave_no_more_than_one_of_them():
    toward_q, toward_k, q, k, _, sentence = made([8, 9])
    own = torch.tensor([i for i, s in enumerate(sentence) if s == 0])
    rng = torch.Generator().manual_seed(4)
    one = tuple(torch.randn(3, HEADS, SIZE, generator=rng).double() for _ in range(2))
    toward_q = toward_q + torch.randn(toward_q.shape, generator=rng).double()
    twice = tuple(torch.cat([t, t, torch.zeros_like(t[:1])]) for t in one)
    left = linking.unexplained(toward_q, toward_k, q, k, own, (one[0], one[1]))[0]
    again = linking.unexplained(toward_q, toward_k, q, k, own, (twice[0], twice[1]))[0]
    assert torch.allclose(left, again, rtol=1e-9)


def test_normal_equations_that_have_no_factor_are_solved_where_they_tell_something():
    rng = torch.Generator().manual_seed(5)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=rng).double()).Q
    values = torch.tensor([4.0, 2.0, 1.0, 0.5, 0.0, -1e-11], dtype=torch.double)  # of rounding, below 0
    normal = (turn * values) @ turn.T
    told = turn[:, :4] @ torch.randn(4, generator=rng).double()
    assert int(torch.linalg.cholesky_ex(normal)[1])
    assert torch.allclose(linking._solver(normal)(normal @ told), told, atol=1e-10)


def test_what_was_left_over_goes_where_its_place_is_free():
    # two sentences of five and four tokens; one lacks its third token, which went to a group of its own,
    # and the other's second stands behind the first one's end
    positions = [0, 1, 3, 4, 0, 2, 3, 2, 5, 1]
    ends = [False, False, False, True, False, False, True, False, False, False]
    groups = [[0, 1, 2, 3, 8], [4, 5, 6], [7], [9]]
    affinity = torch.zeros(10, 10)
    found = linking.settled(groups, affinity, positions, ends, 2)
    assert sorted(map(sorted, found)) == [[0, 1, 2, 3, 7], [4, 5, 6, 9], [8]]


def test_of_two_places_the_closer_one_is_taken_and_no_second_end():
    positions, ends = [0, 2, 0, 2, 1, 1, 3], [False, False, False, False, False, False, True]
    affinity = torch.zeros(7, 7)
    affinity[4, [2, 3]] = affinity[5, [0, 1]] = 1.0
    found = linking.settled([[0, 1], [2, 3], [4], [5], [6]], affinity, positions, ends, 2)
    assert [4 in g for g in found if 2 in g] == [True]
    assert [5 in g for g in found if 0 in g] == [True]
    assert sum(6 in g for g in found) == 1
    kept = linking.settled([[0, 1, 6], [2, 3]], affinity, positions, ends, 2)
    assert sorted(map(sorted, kept)) == [[0, 1, 6], [2, 3]]


def test_where_most_stands_behind_an_end_that_is_what_was_wrong():
    positions, ends = [0, 1, 2, 3, 4], [False, True, False, False, False]
    assert linking.settled([[0, 1, 2, 3, 4]], torch.zeros(5, 5), positions, ends, 1) == [[0, 1, 2, 3, 4]]


def test_a_sentence_has_one_end_and_nothing_behind_it():
    positions, ends = [0, 1, 4, 0, 1, 2], [False, False, True, False, False, True]
    affinity = torch.zeros(6, 6)
    affinity[5, [0, 1, 2]] = 1.0
    found = linking.settled([[0, 1, 2], [3, 4], [5]], affinity, positions, ends, 2)
    assert sorted(map(sorted, found)) == [[0, 1, 2], [3, 4, 5]]


def test_the_one_with_fewer_places_goes_first():
    # row 3 may stand in either sentence and is nearer to the first, where row 4, an end, has its only place
    positions, ends = [0, 0, 3, 2, 2], [False, False, True, False, True]
    affinity = torch.zeros(5, 5)
    affinity[3, 0] = 1.0
    found = linking.settled([[0], [1, 2], [3], [4]], affinity, positions, ends, 2)
    assert sorted(map(sorted, found)) == [[0, 4], [1, 2, 3]]
