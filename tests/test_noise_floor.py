"""Row spaces under noise: against planted ones, and DAGER through few digits, noise and rounded weight changes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.leakage.rowspace.noise_floor import (
    clear_cut,
    few_digits,
    few_values,
    lost_share,
    noise_rank,
    whitened,
)
from gradaudit.leakage.rowspace.noisy_growth import _lost_its_way, _trimmed
from gradaudit.leakage.rowspace.subspace import Span, above_noise, below_wrong, span
from gradaudit.leakage.rowspace.vocabulary import VocabularyCheck
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import LocalTraining
from tiny_models import DECODERS, FAMILIES, batch_of, seen_of, sentences

ROWS, COLUMNS, RANK = 480, 160, 24


def planted(strengths: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a [ROWS, COLUMNS] matrix of these singular values, and its right singular vectors."""
    rng = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn((n, len(strengths)), generator=rng, dtype=torch.float64)).Q for n in (ROWS, COLUMNS)
    )
    return (left * strengths) @ right.T, right


def noise(sigma: float, seed: int = 1) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return sigma * torch.randn((ROWS, COLUMNS), generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("sigma", [1e-9, 1e-3, 1.0])
@pytest.mark.parametrize("rank", [0, 1, RANK, 100])
def test_rank_and_noise_of_a_planted_row_space_are_found(sigma, rank):
    strengths = torch.logspace(3, 2, max(rank, 1), dtype=torch.float64)[:rank] * sigma * 2
    values = torch.linalg.svdvals(planted(strengths)[0] + noise(sigma))
    found, deviation = noise_rank(values, ROWS)
    assert found == rank
    assert deviation == pytest.approx(sigma, rel=0.03)


def test_a_spectrum_without_noise_is_not_taken_for_one():
    values = torch.logspace(0, -5, COLUMNS, dtype=torch.float64)
    assert noise_rank(values, ROWS) == (COLUMNS, 0.0)
    assert above_noise([planted(values)[0]], digits=False, sure=False).lost is None


def test_what_a_direction_loses_is_what_theory_says():
    """The oracle plants rows and measures how much of each lies outside the directions found."""
    edge = math.sqrt(ROWS) + math.sqrt(COLUMNS)
    for strength in (1.3, 2.0, 5.0):
        strengths = torch.full((8,), strength * edge, dtype=torch.float64)
        outside, said = [], []
        for seed in range(6):
            matrix, right = planted(strengths, seed)
            _, values, vh = torch.linalg.svd(matrix + noise(1.0, seed + 50), full_matrices=False)
            inside = (right.T @ vh[:8].T).square().sum(1).mean()
            outside.append(float((1 - inside) / inside))
            said.append(float(lost_share(values[:8], ROWS, COLUMNS).mean()))
        assert sum(said) / sum(outside) == pytest.approx(1, abs=0.15)


def test_matrices_of_different_noise_are_brought_to_one():
    parts = [noise(1.0, 1), noise(1e-4, 2), noise(30.0, 3)[:40]]
    scaled = whitened(parts, sure=True)
    for part in scaled.split([ROWS, ROWS, 40]):
        assert float(part.std()) == pytest.approx(1, rel=0.05)


def test_a_gap_is_a_cut_only_where_what_follows_looks_like_noise():
    matrix, _ = planted(torch.logspace(2, 1, RANK, dtype=torch.float64))
    values = torch.linalg.svdvals(matrix + noise(1e-3))
    assert clear_cut(values, ROWS)[0] == RANK
    steps = torch.cat([torch.tensor([50.0, 10.0]), torch.logspace(0.9, -3, COLUMNS - 2)]).double()
    assert clear_cut(steps, ROWS)[1] < 3, "5 times wider than the next, but no noise behind it"


def test_half_precision_and_bytes_are_known_by_their_digits():
    value = noise(1.0).float()
    assert not few_digits(value)
    assert not few_values(value)
    assert few_digits(value.bfloat16().float())
    assert few_digits(value.half().float())
    assert few_digits(value.bfloat16())
    assert few_values((value * 20).round())


def test_rows_and_columns_of_a_few_digits_are_balanced_and_rows_follow():
    """Noise in proportion to entries of very different size, as bfloat16's."""
    matrix, right = planted(torch.logspace(0, -1, RANK, dtype=torch.float64))
    size = torch.logspace(0, 3, COLUMNS, dtype=torch.float64)
    sent = ((matrix * size).float().bfloat16()).double()
    found = above_noise([sent], digits=True, sure=True)
    assert found.rank == RANK
    assert found.scale is not None
    rows = right.T * size * found.scale
    rows = rows / rows.norm(dim=1, keepdim=True)
    outside = (rows - rows @ found.basis @ found.basis.T).norm(dim=1)
    assert float(outside.max()) < 0.05
    plain = above_noise([sent], digits=False, sure=True)
    gaps = [float(f.values[RANK - 1] / f.values[RANK]) for f in (found, plain)]
    assert gaps[0] > 2 * gaps[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_vocabulary_check_scales_columns_as_the_span_does(load, family):
    """The oracle measures each token by itself, in the scaled space that balancing made."""
    model = load(family)
    rng = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(model.width, 6, generator=rng, dtype=torch.float64)).Q
    scale = torch.rand(model.width, generator=rng, dtype=torch.float64) * 5 + 0.2
    scaled = Span(basis, torch.ones(6), 6, 1.0, 0, ("q",), scale=scale)
    check = VocabularyCheck(model.first_input_parts(), scaled)
    for position in (0, 3):
        expected = scaled.residual(model.first_inputs(position))
        torch.testing.assert_close(check.rough(position), expected, rtol=1e-3, atol=2e-3)
    plain = replace(scaled, scale=None).residual(model.first_inputs(3))
    assert float((plain - scaled.residual(model.first_inputs(3))).abs().max()) > 0.05


def test_the_threshold_is_below_the_wrong_rows():
    residuals = torch.cat([torch.full((3,), 0.01), torch.linspace(0.2, 0.9, 50)])
    assert 0.01 < below_wrong(residuals, 3) < 0.25


def test_wrong_ends_are_cut_and_beginnings_dropped():
    true, other = [0.001, 0.002, 0.001, 0.002], [0.001, 0.02, 0.001]
    grown = {(1, 2, 3, 4): true, (1, 2, 3, 4, 9): [*true, 0.3], (1, 2, 8): [*true[:2], 0.25], (5, 6, 7): other}
    assert set(_trimmed(grown)) == {(1, 2, 3, 4), (5, 6, 7)}, "a middle row may be off: what follows it fits"


def test_a_prefix_that_ended_four_rows_ago_goes_on_no_further():
    true, odd, wrong = [0.001] * 10, [0.001] * 6 + [0.02, 0.001, 0.02, 0.02], [0.001] * 6 + [0.2, 0.3, 0.2, 0.2]
    rows = torch.tensor([true, odd, wrong])
    below = (0.1 / rows).log()
    assert _lost_its_way(rows, below).tolist() == [False, False, True]
    assert _lost_its_way(rows[:, -4:], below[:, -4:]).tolist() == [False] * 3, "too short to tell"
    assert not bool(_lost_its_way(rows, below + 4).any()), "what lies far below the wrong rows is no end"


DEFENDED = {
    "bfloat16": ("quantize", {"bits": 16}),
    "noise": ("gaussian", {"sigma": 1e-4, "relative": True}),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("sizes", [(5,), (4, 3)])
@pytest.mark.parametrize("how", DEFENDED)
@pytest.mark.parametrize("family", DECODERS)
def test_dager_reads_decoders_through_few_digits_and_noise(load, family, how, sizes, seed):
    model = load(family, seed=seed)
    batch = batch_of(model, sentences(sizes, seed))
    name, fields = DEFENDED[how]
    seen = seen_of(Client(model, defenses=(build("defense", name, fields),)), batch)
    found = build("attack", "dager", {})(seen, stream(0, "attack"))
    assert sorted(found.sequences) == sorted(tuple(s) for s in batch.sequences())


@pytest.mark.parametrize("family", DECODERS)
def test_a_role_without_gradient_is_no_noise(load, family):
    """Zeros have few values and few digits; the other roles' gradients are exact."""
    model = load(family)
    seen = seen_of(Client(model), batch_of(model, sentences((5,), 2)))
    name = model.views(1, "q")[0].name
    empty = replace(seen, tensors={**seen.tensors, name: torch.zeros_like(seen.role(1, "q")[0])}, views=seen.views)
    found = span(empty, 1, noise=True)
    assert found is not None
    assert found.lost is None


@pytest.mark.parametrize("family", DECODERS)
def test_dager_reads_the_weight_change_of_many_local_steps(load, family):
    model = load(family)
    batch = batch_of(model, sentences((5, 4), 2))
    training = LocalTraining("sgd", 1e-3, 5, 1)
    seen = seen_of(Client(model, training), batch)
    found = build("attack", "dager", {})(seen, stream(0, "attack"))
    assert sorted(found.sequences) == sorted(tuple(s) for s in batch.sequences())


def test_without_noise_the_span_is_what_it_was(load):
    model = load("gpt2")
    seen = seen_of(Client(model), batch_of(model, sentences((5, 4), 2)))
    plain, found = (span(seen, 1, noise=n) for n in (False, True))
    assert found.lost is None
    assert torch.equal(found.basis, plain.basis)
