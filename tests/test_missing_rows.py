"""Rows that were missed: where the others' signals say that they lie, and programs that lean there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradaudit.leakage.decoding import missing_rows
from gradaudit.leakage.decoding.dropout_masks import refine_masks, relaxed_masks
from gradaudit.leakage.decoding.missing_rows import Leaning
from gradaudit.leakage.decoding.rows import Row, Search

WIDTH, OUT = 192, 576


def made(rows: int, seed: int, apart: bool = False, copies: int = 1) -> SimpleNamespace:
    """Return masked rows, signals, and the gradient of both; `apart`: signals are orthogonal."""
    rng = torch.Generator().manual_seed(seed)
    clean = torch.randn(rows, WIDTH, generator=rng, dtype=torch.double)
    for start in range(0, rows, copies):
        clean[start : start + copies] = clean[start].clone()
    kept = torch.rand(rows, WIDTH, generator=rng) >= 0.1
    signals = torch.randn(rows, OUT, generator=rng, dtype=torch.double)
    if apart:
        signals = torch.linalg.qr(signals.T).Q.T
    entering = clean * kept
    basis = torch.linalg.svd(entering, full_matrices=False).Vh.T.contiguous()
    inputs = SimpleNamespace(
        basis=basis,
        shifts=torch.zeros(0, WIDTH, dtype=torch.double),
        relaxed=lambda some, **objective: relaxed_masks(basis, some, **objective),
    )
    return SimpleNamespace(
        clean=clean, kept=kept, rows=entering, signals=signals, gradient=signals.T @ entering, inputs=inputs
    )


def paid(cost: Tensor, basis: Tensor, rows: Tensor) -> Tensor:
    at = torch.nn.functional.normalize(rows, dim=1) @ basis
    return ((at @ cost) * at).sum(1)


def test_where_signals_have_nothing_in_common_missing_rows_lean_for_nothing():
    case = made(60, seed=0, apart=True)
    lies = Leaning.of(case.inputs.basis, case.rows[:40], case.gradient)
    costs = paid(lies.cost(case.inputs), case.inputs.basis, case.rows)
    assert float(costs[40:].max()) < 1e-12 * float(costs[:40].min())
    # nothing is special about these rows: the others of the same gradient, taken for missing, pay nothing instead
    other = Leaning.of(case.inputs.basis, case.rows[20:], case.gradient)
    costs = paid(other.cost(case.inputs), case.inputs.basis, case.rows)
    assert float(costs[:20].max()) < 1e-12 * float(costs[20:].min())


def test_where_signals_are_drawn_missing_rows_pay_little():
    case = made(120, seed=1)
    lies = Leaning.of(case.inputs.basis, case.rows[:90], case.gradient)
    anywhere = torch.randn(200, 120, generator=torch.Generator().manual_seed(2), dtype=torch.double)
    cost = lies.cost(case.inputs)
    chance = paid(cost, case.inputs.basis, anywhere @ case.inputs.basis.T)
    assert float(paid(cost, case.inputs.basis, case.rows[90:]).median()) < 0.25 * float(chance.median())


def test_shifts_of_unknown_size_cost_nothing():
    case = made(60, seed=3, apart=True)
    shifts = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(4), dtype=torch.double)
    basis = torch.linalg.qr(torch.cat([case.inputs.basis, shifts.T], 1)).Q
    lies = Leaning.of(case.inputs.basis, case.rows[:40], case.gradient)
    moved = case.rows[40:] + torch.tensor([[0.7, -1.3]], dtype=torch.double) @ shifts
    without = lies.cost(SimpleNamespace(basis=basis, shifts=shifts[:0]))  # type: ignore[arg-type]
    within = lies.cost(SimpleNamespace(basis=basis, shifts=shifts))  # type: ignore[arg-type]
    assert float(paid(within, basis, moved).max()) < 1e-9 * float(paid(without, basis, moved).min())
    assert float(paid(within, basis, case.rows[:40]).min()) > 1e-3 * float(paid(without, basis, case.rows[:40]).min())


def test_along_certified_rows_nothing_is_open():
    case = made(60, seed=5)
    known, gone = case.rows[:40], case.rows[40:]
    lies = Leaning.of(case.inputs.basis, known, case.gradient)
    inverse = torch.linalg.inv(gone @ lies.free.T)
    foreign = (inverse @ gone @ torch.linalg.pinv(known)).T[10:]  # how the last thirty are contaminated
    rest = lies.beyond(range(10, 40), foreign)
    space = rest.space()
    assert space.shape[1] == 20 + 10
    assert float((gone - (gone @ space) @ space.T).norm() / gone.norm()) < 1e-9
    strange = case.rows[10:40]
    assert float((strange - (strange @ space) @ space.T).norm() / strange.norm()) > 0.5


def test_where_every_decoded_row_is_certified_the_cost_is_nothing_and_no_number_is_lost():
    case = made(60, seed=6)
    known, gone = case.rows[:40], case.rows[40:]
    lies = Leaning.of(case.inputs.basis, known, case.gradient)
    foreign = (torch.linalg.inv(gone @ lies.free.T) @ gone @ torch.linalg.pinv(known)).T
    rest = lies.beyond(range(40), foreign)
    space = SimpleNamespace(basis=rest.space(), shifts=case.inputs.shifts)
    assert torch.equal(rest.cost(space), torch.zeros(20, 20, dtype=torch.double))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_programs_that_lean_find_what_others_miss(seed: int):
    case = made(132, seed=10 + seed, copies=4)
    known = torch.arange(132) % 4 != 3  # three of four copies of each: two thirds of the coordinates are taken
    lies = Leaning.of(case.inputs.basis, case.rows[known], case.gradient)
    cost = lies.cost(case.inputs)
    wanted, never = case.clean[~known], torch.zeros(33, WIDTH, dtype=torch.bool)
    outside = torch.eye(WIDTH, dtype=torch.double) - case.inputs.basis @ case.inputs.basis.T

    def found(weight: float) -> int:
        rng = torch.Generator().manual_seed(seed)
        start = missing_rows._decimated(case.inputs, wanted, never, cost, weight, rng)
        masks, _ = refine_masks(outside, wanted, start)
        return int((masks == case.kept[~known]).all(1).sum())

    plain, leaning = found(0.0), found(4.0)
    assert plain <= 10
    assert leaning >= 18


def test_a_token_that_stands_at_a_place_as_often_as_there_are_sentences_is_not_tried():
    nothing = torch.zeros(0)
    space: Any = SimpleNamespace(
        model=SimpleNamespace(special=SimpleNamespace(prefix=(101,)), max_length=3, vocabulary_size=50),
        span=SimpleNamespace(rank=5),
        near=lambda position, count: torch.arange(position * 10, position * 10 + 30),
    )
    rows = [Row(101, 0, nothing, nothing)] * 2 + [Row(10, 1, nothing, nothing)]
    how = Search(2, 30, 3)
    kinds = missing_rows._kinds(space, space, how, rows, 0)
    assert (0, 101) not in kinds
    assert len(kinds[1, 10][0]) == 1
    tries = [kinds[2, 20 + rank][1] for rank in range(24)]
    assert tries == sorted(tries, reverse=True)
    assert (2, 44) not in kinds
    wider = missing_rows._kinds(SimpleNamespace(**vars(space)), space, how, rows, 1)
    assert (2, 44) in wider, "a round that found nothing looks further, in a space that proven sentences made small"
    assert (0, 101) in missing_rows._kinds(space, space, replace(how, size=3), rows, 0)


def test_a_known_copy_met_again_in_the_smaller_space_takes_no_missing_rows_place():
    width = 24
    known, gone = torch.rand(2, width, generator=torch.Generator().manual_seed(0)) >= 0.1
    words = torch.eye(50, width, dtype=torch.double) + 1.0

    def finished(clean: Tensor, start: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        first = (clean == words[1]).all(1)
        return torch.where(first[:, None], known, gone), first | (clean == words[10]).all(1)

    def near(position: int, count: int) -> Tensor:
        return torch.arange(10, 12)

    common = {
        "model": SimpleNamespace(special=SimpleNamespace(prefix=(1,)), max_length=2, vocabulary_size=50),
        "near": near,
        "clean": lambda position, ids: words[ids],
        "forbid": lambda clean, rows, tries, rng: torch.zeros(tries, width, dtype=torch.bool),
        "relaxed": lambda rows, **objective: torch.rand(rows.shape, generator=objective["rng"], dtype=torch.double),
        "differ": lambda clean, one, other: not torch.equal(one, other),
    }
    whole: Any = SimpleNamespace(**common, span=SimpleNamespace(rank=2), accepted=finished)
    # in the smaller space any mask passes as it is, unlike the known one
    smaller: Any = SimpleNamespace(
        **common,
        span=SimpleNamespace(rank=1),
        accepted=lambda clean, start, rate: (start, torch.ones(len(clean), dtype=torch.bool)),
    )
    rows, how = [Row(1, 0, known, words[1])], Search(2, 2, 2)
    rng = torch.Generator().manual_seed(1)
    cost = torch.zeros(width, width, dtype=torch.double)
    more = missing_rows.look_again(smaller, whole, how, rows, cost, 0, 0, rng)
    assert [(row.position, row.token) for row in more] == [(1, 10)]
    assert torch.equal(more[0].kept, gone)
