"""Row spaces of gradients: rank, span and thresholds on matrices whose answer is known, then on every family."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradaudit.client.client import Client
from gradaudit.leakage.rowspace.subspace import Span, cut_by_gap, gap_rank, span, stack, tolerance_rank
from gradaudit.leakage.rowspace.vocabulary import NearTokens, VocabularyCheck, near_tokens
from tiny_models import DECODERS, DEPTH, FAMILIES, SETTINGS, WIDTH, batch_of, seen_of, sentences

EPS = torch.finfo(torch.float32).eps


def product(tokens: int, width: int, out: int, seed: int) -> Tensor:
    """Return D^T X of random errors and inputs, computed in float32 as a client would."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn((tokens, out), generator=rng).T @ torch.randn((tokens, width), generator=rng)


def spectrum(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix.double())


def flat_span(basis: Tensor, layer: int = 0) -> Span:
    return Span(basis, torch.ones(basis.shape[1]), basis.shape[1], 1.0, layer, ("q",))


@pytest.mark.parametrize("width", [32, 64, 128])
def test_rank_is_the_number_of_tokens_up_to_nine_tenths_of_the_width(width):
    for tokens in {1, 2, 3, width // 4, width // 2, width * 3 // 4, int(0.9 * width)}:
        for seed in range(5):
            rank, confidence = gap_rank(spectrum(product(tokens, width, 3 * width, seed)), EPS)
            assert rank == tokens
            assert confidence > 50


def test_rank_survives_directions_of_very_different_strength():
    """Tokens whose errors differ ten-thousandfold: a gap between true directions is no cut."""
    rng = torch.Generator().manual_seed(0)
    strength = torch.logspace(0, -4, 10)
    D, X = torch.randn((10, 192), generator=rng) * strength[:, None], torch.randn((10, 64), generator=rng)
    assert gap_rank(spectrum(D.T @ X), EPS)[0] == 10
    D[5:] *= 1e-1  # a tenfold gap in the middle, and all above rounding
    assert gap_rank(spectrum(D.T @ X), EPS)[0] == 10


@pytest.mark.parametrize("seed", range(5))
def test_full_rank_and_noise_have_no_gap(seed):
    rng = torch.Generator().manual_seed(seed)
    for matrix in (product(128, 64, 192, seed), torch.randn((192, 64), generator=rng)):
        assert gap_rank(spectrum(matrix), EPS) == (64, 1.0)
    small = product(10, 64, 192, seed) + 1e-3 * torch.randn((192, 64), generator=rng)
    assert gap_rank(spectrum(small), EPS)[0] == 10, "noise far below the signal leaves its gap"


def test_rank_of_nothing_is_none():
    assert gap_rank(torch.zeros(8), EPS) == (0, 1.0)
    assert gap_rank(torch.zeros(0), EPS) == (0, 1.0)
    assert gap_rank(torch.ones(1), EPS) == (1, 1.0)
    assert tolerance_rank(torch.zeros(0), (0, 0)) == 0


def test_published_tolerance_counts():
    values = torch.tensor([1.0, 0.5, 1e-3, 3e-5, 1e-5, 1e-7], dtype=torch.float64)
    # 192 x 1.2e-7 = 2.3e-5
    assert tolerance_rank(values, (192, 64)) == 4
    assert tolerance_rank(values[:3], (192, 64)) == 3


def test_residual_is_0_inside_1_across_and_the_sine_between():
    rng = torch.Generator().manual_seed(0)
    frame = torch.linalg.qr(torch.randn((16, 16), generator=rng, dtype=torch.float64)).Q
    inside, across = frame[:, :5], frame[:, 5:]
    where = flat_span(inside)
    rows = torch.randn((7, 5), generator=rng, dtype=torch.float64) @ inside.T
    outer = torch.randn((7, 11), generator=rng, dtype=torch.float64) @ across.T
    assert float(where.residual(3.7 * rows).max()) < 1e-14
    torch.testing.assert_close(where.residual(0.01 * outer), torch.ones(7, dtype=torch.float64))
    mixed = torch.nn.functional.normalize(rows, dim=1) * 0.8 + torch.nn.functional.normalize(outer, dim=1) * 0.6
    torch.testing.assert_close(where.residual(mixed), torch.full((7,), 0.6, dtype=torch.float64))
    assert where.residual(mixed.float()[None]).shape == (1, 7)


def test_a_zero_row_is_evidence_of_nothing():
    """A padding token's embedding is zero: it must not count as inside every span."""
    basis = torch.linalg.qr(torch.randn((16, 5), generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    assert float(flat_span(basis).residual(torch.zeros(1, 16))[0]) > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_rough_check_of_the_vocabulary_equals_the_exact_residual(load, family):
    model = load(family)
    real = span(seen_of(Client(model), batch_of(model, sentences((5, 4), 1))), 0)
    rng = torch.Generator().manual_seed(0)
    drawn = flat_span(torch.linalg.qr(torch.randn((WIDTH, 20), generator=rng, dtype=torch.float64)).Q)
    assert real is not None
    words = [t for t in range(model.vocabulary_size) if t not in model.special.ids]
    for where in (real, drawn):
        check = VocabularyCheck(model.first_input_parts(), where)
        for position in (0, 1, 7, model.max_length - 1):
            exact = where.residual(model.first_inputs(position).double())[words]
            torch.testing.assert_close(check.rough(position)[words].double(), exact, rtol=0, atol=2e-3)
            near = near_tokens(model, check.rough(position), where, position, 0.05)
            assert set(near.ids.tolist()) & set(words) == {t for t, r in zip(words, exact, strict=True) if r < 0.05}
            assert torch.equal(near.residuals, near.residuals.sort().values)


@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_the_batchs_inputs_lie_in_the_span_and_others_do_not(load, family, task):
    model = load(family, task)
    batch = batch_of(model, sentences((5, 4, 3), 1))
    seen = seen_of(Client(model), batch)
    ends = 1 if task == "causal-lm" else 0  # the last token is a label alone
    for layer in range(DEPTH):
        where = span(seen, layer)
        assert where is not None
        assert where.roles == ("q", "k", "v")
        assert where.rank < WIDTH
        for sentence in batch.sequences():
            rows = model.attention_inputs(layer, torch.tensor([sentence]))[0]
            assert float(where.residual(rows[: len(rows) - ends].double()).max()) < 1e-3
            other = [(t - 4 + 41) % 80 + 4 for t in sentence]
            strange = where.residual(model.attention_inputs(layer, torch.tensor([other]))[0])
            frame = slice(1, -1) if model.special.prefix and layer == 0 else slice(None)
            assert float(strange[frame].min()) > 0.05


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet"])
def test_dropout_takes_the_inputs_out_of_the_span(load, family):
    model = load(family)
    batch = batch_of(model, sentences((5, 4), 1))
    rows = model.attention_inputs(0, torch.tensor(batch.sequences()[:1]))[0]
    off, on = (span(seen_of(Client(model, dropout=d), batch), 0) for d in (False, True))
    assert float(off.residual(rows).max()) < 1e-3 < float(on.residual(rows).min())


@pytest.mark.parametrize("family", DECODERS)
def test_stacking_recovers_what_one_role_lacks(load, family):
    """The first token of a causal sentence attends to itself alone: it has no query gradient."""
    model = load(family)
    batch = batch_of(model, sentences((5, 4), 1))
    seen = seen_of(Client(model), batch)
    firsts = torch.cat([model.attention_inputs(0, torch.tensor([s]))[0, :1] for s in batch.sequences()])
    query, every = span(seen, 0, ("q",)), span(seen, 0)
    assert query.rank == batch.tokens - 2
    assert every.rank == batch.tokens
    assert float(query.residual(firsts).min()) > 0.05
    assert float(every.residual(firsts).max()) < 1e-3


def test_stack_scales_each_role_and_leaves_zero_and_unseen_ones_out(load):
    model = load("bert")
    batch = batch_of(model, sentences((5,), 1))
    stacked, used = stack(seen_of(Client(model), batch), 0)
    assert used == ("q", "k", "v")
    assert stacked.dtype == torch.float64
    for part in stacked.chunk(3):
        assert float(part.norm()) == pytest.approx(1.0)
    assert stack(seen_of(Client(model), batch, "0:v,o"), 0)[1] == ("v",)
    assert stack(seen_of(Client(model), batch, "0:q"), 1) == (None, ())
    one = load("gpt2")
    alone = seen_of(Client(one), batch_of(one, ["river"]))
    assert stack(alone, 0)[1] == ("v",), "a single token has neither query nor key gradient"
    assert span(alone, 0, ("q", "k")) is None
    assert span(alone, 0).rank == 1


LOW, HIGH = 5e-6, 0.05


@pytest.mark.parametrize(
    ("residuals", "above", "below"),
    [
        ([], LOW, HIGH),
        ([1e-7, 2e-6, 4e-6], LOW, HIGH),
        ([0.3, 0.7, 0.9], LOW, HIGH),
        ([1e-6, 0.5], LOW, HIGH),
        ([2e-5, 4e-5, 0.02, 0.3], 4e-5, 0.02),
        ([6e-6, 9e-6, 3e-2], 9e-6, 3e-2),
        ([2e-5, 4e-5], 4e-5, HIGH),
        ([0.02, 0.04, 0.3], LOW, 0.02),
    ],
    ids=["empty", "all true", "none true", "both", "between", "beside rounding", "true and noisy", "wrong and near"],
)
def test_threshold_lies_in_the_widest_gap(residuals, above, below):
    cut = cut_by_gap(torch.tensor(residuals), LOW, HIGH)
    assert cut == pytest.approx(math.sqrt(above * below), rel=1e-4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-9, 1.0), max_size=12))
def test_threshold_is_in_bounds_and_no_residual_is_near_it(residuals):
    rows = torch.tensor(residuals, dtype=torch.float64)
    cut = cut_by_gap(rows, LOW, HIGH)
    assert LOW < cut < HIGH
    inside = int(((rows > LOW) & (rows < HIGH)).sum())
    widest = (HIGH / LOW) ** (1 / (inside + 1))  # at least the mean gap
    for r in residuals:
        assert max(cut / r, r / cut) > math.sqrt(widest) * 0.999 or not LOW < r < HIGH
    kept = NearTokens(torch.arange(len(rows)), rows, torch.zeros_like(rows)).below(cut)
    assert kept.residuals.tolist() == [r for r in residuals if r < cut]


def test_the_last_clear_gap_is_the_rank_though_an_earlier_one_is_wider():
    values = torch.tensor([1.0, 0.5, 0.4, 3e-6, 2e-6, 1e-8, 1e-8, 9e-9], dtype=torch.double)
    assert gap_rank(values, EPS)[0] == 5
