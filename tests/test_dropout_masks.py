"""Decoding masked rows: on spans made here the mask is found exactly, and nothing that was not put in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from gradaudit.leakage.decoding import dropout_masks

WIDTH = 192


def made(rows: int, rate: float, seed: int, copies: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return the basis of some masked rows, the clean rows, and the masks; the first row has several copies."""
    rng = torch.Generator().manual_seed(seed)
    clean = torch.randn(rows, WIDTH, generator=rng, dtype=torch.double)
    clean[:copies] = clean[0].clone()
    kept = torch.rand(rows, WIDTH, generator=rng) >= rate
    masked = clean * kept
    noise = 1e-8 * torch.randn(rows, WIDTH, generator=rng, dtype=torch.double)  # a float32 gradient's
    _, _, vh = torch.linalg.svd(masked + noise, full_matrices=False)
    return vh.T.contiguous(), clean, kept


def decoded(basis: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    outside = torch.eye(WIDTH, dtype=torch.double) - basis @ basis.T
    return dropout_masks.refine_masks(outside, rows, dropout_masks.relaxed_masks(basis, rows) > 0.5)


@pytest.mark.parametrize(("rows", "rate"), [(5, 0.1), (30, 0.1), (80, 0.1), (20, 0.3), (60, 0.3), (50, 0.4)])
def test_every_mask_is_found_exactly(rows: int, rate: float):
    basis, clean, kept = made(rows, rate, seed=rows)
    found, outside = decoded(basis, clean)
    assert torch.equal(found, kept)
    assert float(outside.max()) < 1e-5


def test_what_was_not_put_in_stays_far_outside():
    basis, _, _ = made(30, 0.1, seed=1)
    strangers = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.double)
    found, outside = decoded(basis, strangers)
    plausible = found.double().mean(1) > 0.5  # an empty mask lies in every span, and is no token
    assert not bool((plausible & (outside < 0.05)).any())
    near, _, _ = made(30, 0.1, seed=1)
    assert bool((decoded(near, made(30, 0.1, seed=1)[1])[1] < 1e-5).all())  # the same test does find what is there


def test_only_a_row_of_which_little_is_kept_is_given_up_early():
    basis, clean, kept = made(60, 0.1, seed=4)
    strangers = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.double)
    both = torch.cat([clean, strangers])
    plain, early = (dropout_masks.relaxed_masks(basis, both, least=least) for least in (0.0, 0.75))
    first = dropout_masks.relaxed_masks(basis, both, rounds=0)
    stopped = (first > 0.5).double().mean(1) < 0.75
    outside = torch.eye(WIDTH, dtype=torch.double) - basis @ basis.T
    assert torch.equal(dropout_masks.refine_masks(outside, clean, early[:60] > 0.5)[0], kept)
    assert int(stopped.sum()) > 20
    assert torch.equal(early[stopped], first[stopped])
    assert torch.allclose(early[~stopped], plain[~stopped], atol=1e-4)
    assert float((plain[stopped] - first[stopped]).abs().max()) > 0.1, "rounds do change what they are not spent on"


def test_flips_mend_a_mask_that_is_nearly_right_and_never_make_one_worse():
    basis, clean, kept = made(20, 0.1, seed=2)
    outside = torch.eye(WIDTH, dtype=torch.double) - basis @ basis.T
    wrong = kept.clone()
    wrong[:, ::24] ^= True
    before = ((clean * wrong) @ outside).norm(dim=1)
    mended, left = dropout_masks.refine_masks(outside, clean, wrong)
    assert torch.equal(mended, kept)
    assert bool((((clean * mended) @ outside).norm(dim=1) <= before).all())
    assert float(left.max()) < 1e-5


def test_a_linear_program_agrees_with_a_solver_of_its_own():
    basis, clean, kept = made(60, 0.1, seed=4)
    matrix = (basis / clean[0][:, None]).numpy()
    weight = -(clean[0].abs().numpy() @ matrix)
    bounds = np.concatenate([np.full(WIDTH, 1 + 1e-6), np.full(WIDTH, 1e-6)])
    solved = linprog(weight, A_ub=np.concatenate([matrix, -matrix]), b_ub=bounds, bounds=(None, None), method="highs")
    exact = torch.from_numpy(matrix @ solved.x > 0.5)
    assert torch.equal(exact, kept[0])
    assert torch.equal((dropout_masks.relaxed_masks(basis, clean[:1]) > 0.5)[0], exact)


def test_copies_are_found_one_by_one_until_there_are_no_more():
    basis, clean, kept = made(40, 0.1, seed=3, copies=6)
    outside = torch.eye(WIDTH, dtype=torch.double) - basis @ basis.T
    rng = torch.Generator().manual_seed(0)
    known = [kept[0]]
    for _ in range(12):
        forbidden = dropout_masks.coordinates_to_forbid(clean[0], torch.stack(known), 24, rng)
        rows = clean[:1].expand(24, -1)
        masks = dropout_masks.relaxed_masks(basis, rows, forbidden=forbidden, rng=rng, steps=180) > 0.5
        found, left = dropout_masks.refine_masks(outside, rows, masks)
        for mask in found[(left < 1e-5) & (found.double().mean(1) > 0.5)]:  # the empty mask lies in every span
            if not any(torch.equal(mask, k) for k in known):
                known.append(mask)
    assert {tuple(k.tolist()) for k in known} == {tuple(k.tolist()) for k in kept[:6]}


def test_what_is_forbidden_is_kept_by_every_known_copy():
    _, clean, kept = made(10, 0.2, seed=5, copies=4)
    forbidden = dropout_masks.coordinates_to_forbid(clean[0], kept[:4], 40, torch.Generator().manual_seed(1))
    assert bool((forbidden.sum(1) == 1).all())
    assert not bool((forbidden & ~kept[:4].all(0)).any())


def test_a_coordinate_that_some_known_copy_drops_is_not_forbidden():
    row, known = torch.ones(8, dtype=torch.double), torch.ones(3, 8, dtype=torch.bool)
    known[0, :3], known[1, 2:5], known[:, 7] = False, False, False
    forbidden = dropout_masks.coordinates_to_forbid(row, known, 20, torch.Generator().manual_seed(0))
    assert set(torch.where(forbidden)[1].tolist()) == {5, 6}


def test_random_objectives_differ_from_the_plain_one_and_from_each_other():
    basis, _, _ = made(120, 0.1, seed=6)  # too full to decode: what comes out depends on the objective
    strangers = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.double)
    plain = dropout_masks.relaxed_masks(basis, strangers) > 0.5
    one, other = (
        (dropout_masks.relaxed_masks(basis, strangers, rng=torch.Generator().manual_seed(s)) > 0.5) for s in (0, 1)
    )
    assert not torch.equal(one, plain)
    assert not torch.equal(one, other)
