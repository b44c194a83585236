"""What tells rows of a crowded batch from others: leverage, what lies outside a row space, and what rows share."""

from __future__ import annotations

import pytest
import torch

from gradaudit.leakage.rowspace.evidence import deviation, leverage_of, outside_of, own_of
from gradaudit.models.views import ROLES
from tiny_models import DECODERS, ENCODERS

INSIDE, WIDE = 24, 96


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


def test_leverage_is_what_the_inverse_of_the_gram_matrix_says():
    stacked, rows, usual = normal(40, 12, seed=0), normal(7, 12, seed=1), normal(200, 12, seed=2)
    top = torch.linalg.svdvals(stacked)[0]
    energy = torch.einsum("ni,ij,nj->n", unit(rows), torch.linalg.inv(stacked.T @ stacked) * top**2, unit(rows))
    expected = (energy / own_of(unit(usual), 12)(unit(rows))).log()
    torch.testing.assert_close(leverage_of(stacked, usual)(rows), expected, rtol=1e-6, atol=1e-8)


def test_outside_is_the_distance_from_the_row_space():
    """The oracle is least squares: what no combination of the gradient's rows gives of a row."""
    matrix, rows, usual = normal(INSIDE, WIDE, seed=3), normal(5, WIDE, seed=4), normal(4000, WIDE, seed=5)
    measure = outside_of(matrix, 0.0, usual)
    mix = torch.linalg.lstsq(matrix.T, unit(rows).T).solution
    left = (unit(rows).T - matrix.T @ mix).square().sum(0)
    # rows of no preferred direction have next to nothing in common
    torch.testing.assert_close(measure(rows), left.log(), rtol=0, atol=0.2)
    inside = normal(3, INSIDE, seed=6) @ matrix
    assert bool((measure(inside) < -20).all())


def test_directions_below_rounding_are_not_the_batch_s():
    strong, weak, usual = normal(10, WIDE, seed=7), normal(10, WIDE, seed=8), normal(400, WIDE, seed=9)
    matrix = torch.cat([strong, 1e-4 * weak])
    assert bool((outside_of(matrix, 0.0, usual)(weak) < -20).all())
    assert bool((outside_of(matrix, 0.1, usual)(weak) > -1).all())


def test_with_more_rows_than_directions_those_of_the_batch_lie_nearer():
    """Twice as many tokens as the gradient has directions: none lies inside, and still every one is told apart."""
    tokens, usual = normal(2 * INSIDE, WIDE, seed=10), normal(2000, WIDE, seed=11)
    matrix = normal(2 * INSIDE, INSIDE, seed=12).T @ tokens
    rated = deviation(outside_of(matrix, 0.0, usual[::2]), usual[1::2])
    there, others = rated(tokens), rated(normal(400, WIDE, seed=13))
    assert float(there.median()) < -3
    assert float((there[:, None] < others).double().mean()) > 0.98
    assert abs(float(others.median())) < 0.3


def test_a_row_of_what_all_rows_share_is_not_told_by_it():
    """A row that is nearly one loud direction lies near any span that holds it: its own part decides."""
    loud = unit(normal(WIDE, seed=14))
    usual = normal(2000, WIDE, seed=15)
    usual[::4] += 300 * loud
    tokens = normal(INSIDE - 1, WIDE, seed=16)
    matrix = normal(INSIDE, INSIDE, seed=17) @ torch.cat([tokens, loud[None]])
    rated = deviation(outside_of(matrix, 0.0, usual[::2]), usual[1::2])
    foreign = normal(50, WIDE, seed=18) + 300 * loud
    assert float(rated(foreign).min()) > -4
    assert float(rated(tokens).max()) < -20


def test_what_is_common_is_taken_off_and_the_rest_stays():
    rows = unit(normal(3000, WIDE, seed=19) * torch.cat([torch.full((4,), 30.0), torch.ones(WIDE - 4)]))
    own = own_of(rows, WIDE)(torch.eye(WIDE, dtype=torch.float64))
    assert float(own[:4].max()) < 0.01
    assert float(own[4:].min()) > 0.7


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_inputs_of_every_matrix_are_what_the_model_s_own_pass_reads(load, family):
    model = load(family)
    ids = torch.tensor([[4, 5, 6, 7], [7, 9, 8, 5]])
    wanted = [(layer, role) for layer in range(model.depth) for role in ROLES]
    read: dict[tuple[int, str], torch.Tensor] = {}
    hooks = []
    for layer, role in wanted:
        place = model.views(layer, role)[0].parameter.removesuffix(".weight")
        hooks.append(
            model.module.get_submodule(place).register_forward_pre_hook(
                lambda _, inputs, key=(layer, role): read.__setitem__(key, inputs[0].detach())
            )
        )
    try:
        model.logits(ids=ids, mask=torch.ones_like(ids))
    finally:
        for hook in hooks:
            hook.remove()
    for key, found in zip(wanted, model.matrix_inputs(wanted, ids), strict=True):
        torch.testing.assert_close(found, read[key], rtol=1e-5, atol=1e-6)
    assert not any(m._forward_pre_hooks for m in model.module.modules())
