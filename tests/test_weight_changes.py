"""Weight changes read as gradients: the optimizers' maps against torch, errors against chance, and no false proof."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import tiny_models
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.leakage.decoding.rows import LEAST_KEPT, MaskedInputs, Row, Search, least_kept
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.leakage.uneven import decoded
from gradaudit.leakage.uneven.decoded import _Decoding
from gradaudit.leakage.uneven.decoded_change import DecodedChange
from gradaudit.leakage.uneven.entries import Entries, entries
from gradaudit.leakage.uneven.exact_rows import APART, EXPLAINED, Masked, astray, explain, mended, other_tokens, pulls
from gradaudit.leakage.uneven.least_squares import against, inverses, normal_matrices, solved
from gradaudit.leakage.uneven.low_rank import Fitting, LowRank
from gradaudit.leakage.uneven.overlooked import overlooked
from gradaudit.leakage.uneven.steps import AdamStep, PlainStep
from gradaudit.leakage.uneven.weighted import Weighted
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.streams import stream
from gradaudit.types import Batch, Given, LocalTraining, Observation
from made_data import sample_batch

ADAMW = LocalTraining("adamw", 5e-5, weight_decay=0.01)
SGD = LocalTraining("sgd", 1e-2)
SIZES = torch.logspace(-10, -3, 4000, dtype=torch.float64)
"""Gradients from a hundredth of eps to a hundred thousand times eps."""


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


def seen_of(model, batch: Batch, training: LocalTraining, given: Given | None = None) -> Observation:
    client = Client(model, training, dropout=True)
    return tiny_models.seen_of(client, batch, "0:q,k,v", given or Given(lengths=True), 3)


def stepped(training: LocalTraining, weights: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the weights after torch's own step."""
    weights = weights.clone().requires_grad_()
    weights.grad = gradient.float()
    if training.optimizer == "sgd":
        torch.optim.SGD([weights], lr=training.learning_rate).step()
    else:
        torch.optim.AdamW([weights], lr=training.learning_rate, weight_decay=training.weight_decay).step()
    return weights.detach()


@pytest.mark.parametrize("training", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_entries_are_torchs_step_up_to_the_error_they_state(load, training: LocalTraining):
    model = load("bert")
    name = "0.q"
    view = model.views(0, "q")[0]
    before = view(model.parameters()[view.parameter]).detach()
    rng = torch.Generator().manual_seed(0)
    gradient = (
        1e-5 * torch.randn(before.shape, generator=rng, dtype=torch.float64) * torch.rand(before.shape, generator=rng)
    )
    after = stepped(training, before, gradient)
    seen = tiny_models.seen_of(Client(model, training, dropout=True), batch_of_words(model), "0:q", Given(), 3)
    found = entries(replace(seen, tensors={name: after - before}), 0, ["q"])
    assert found is not None
    off = (found.sent - found.step.sent(gradient)) / found.spread
    # the error is uniform within half a step of the grid: root mean square 1, never beyond sqrt(3) but for arithmetic
    assert off.square().mean() == pytest.approx(1.0, abs=0.15)
    assert off.abs().max() < 2.5


def batch_of_words(model) -> Batch:
    return tiny_models.batch_of(model, tiny_models.sentences([4, 5], 0))


def test_adams_map_is_inverted_where_it_is_not_saturated():
    step = AdamStep()
    spread = torch.full_like(SIZES, 1e-5)
    for sign in (1, -1):
        found, known = step.behind(step.sent(sign * SIZES), spread)
        assert torch.allclose(found[known], sign * SIZES[known], rtol=1e-6)
        assert known.sum() > 2000
        assert (found[~known].sign() == sign).all()
        assert (found[~known].abs() <= SIZES[~known]).all(), "of saturated ones a bound"
    slope = (step.sent(SIZES * 1.001) - step.sent(SIZES)) / (SIZES * 0.001)
    assert torch.allclose(step.slope(SIZES), slope, rtol=0.01)
    assert torch.equal(PlainStep().behind(SIZES, spread)[0], SIZES)


def test_the_secant_is_the_line_through_two_points_of_the_map():
    step = AdamStep()
    other = SIZES.flip(0)
    for sign in (1, -1):
        line = (step.sent(SIZES) - step.sent(sign * other)) / (SIZES - sign * other)
        assert torch.allclose(step.secant(SIZES, sign * other), line, rtol=1e-6)
    assert torch.allclose(step.secant(SIZES, SIZES), step.slope(SIZES))


def made(seed: int, rank: int, n: int = 120, d: int = 48) -> tuple[Entries, torch.Tensor, torch.Tensor]:
    """Return entries of a made-up gradient of low rank as AdamW's first step shows them, its rows, and itself."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randn((rank, d), generator=rng, dtype=torch.float64)
    gradient = 3e-6 * torch.randn((n, rank), generator=rng, dtype=torch.float64) @ rows
    spread = torch.exp(torch.randn((n, d), generator=rng, dtype=torch.float64)) * 1e-4
    step = AdamStep()
    sent = step.sent(gradient) + spread * torch.randn((n, d), generator=rng, dtype=torch.float64)
    return Entries(sent, spread, step, {"0.q": n}), rows, gradient


@pytest.mark.parametrize("seed", range(3))
def test_the_fit_finds_rank_and_row_space_and_says_how_far_off_it_is(seed: int):
    seen, rows, _ = made(seed, 6)
    found = Fitting(seen, torch.Generator().manual_seed(9)).fit(40, first=2)
    assert found is not None
    assert 6 <= found.rank <= 8, "nothing told it the rank"
    unit = torch.nn.functional.normalize(rows * found.scale, dim=1)
    inside = unit @ found.basis
    off = (unit - inside @ found.basis.T).norm(dim=1)
    expected = (inside.square() @ found.lost).sqrt()
    assert off.max() < 0.05
    assert ((off / expected) < 2).all()
    assert ((off / expected) > 0.3).all()


def test_lines_and_columns_of_outliers_are_fitted_like_the_others():
    """Most entries of a loud line are signs only, and those of a faint one are known best."""
    seen, rows, gradient = made(1, 6)
    rng = torch.Generator().manual_seed(5)
    loud = [torch.exp(2 * torch.randn(size, generator=rng, dtype=torch.float64)) for size in ((120, 1), (1, 48))]
    gradient, rows = gradient * loud[0] * loud[1], rows * loud[1]
    seen = replace(seen, sent=seen.step.sent(gradient) + seen.spread * torch.randn((120, 48), generator=rng).double())
    found = Fitting(seen, torch.Generator().manual_seed(9)).fit(40, first=6)
    assert found is not None
    assert found.rank <= 12, "33 in one unit for all"
    unit = torch.nn.functional.normalize(rows * found.scale, dim=1)
    assert (unit - unit @ found.basis @ found.basis.T).norm(dim=1).max() < 0.1


def test_noise_alone_has_no_rank():
    rng = torch.Generator().manual_seed(2)
    noise = torch.randn((120, 48), generator=rng, dtype=torch.float64)
    seen = Entries(1e-3 * noise, torch.full_like(noise, 1e-3), PlainStep(), {"0.q": 120})
    fitting = Fitting(seen, rng)
    assert fitting.missing(noise[:, :0], noise[:0], 0.0) == 0


def test_entries_without_a_low_rank_are_given_up_after_a_few_directions(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn((300, 96), generator=rng, dtype=torch.float64)
    fitting = Fitting(Entries(noise, torch.full_like(noise, 1e-4), PlainStep(), {"0.q": 300}), rng)
    ranks: list[int] = []
    grown = Fitting._grown
    monkeypatch.setattr(
        Fitting, "_grown", lambda self, left, rows, *more: ranks.append(len(rows)) or grown(self, left, rows, *more)
    )
    assert fitting.fit(80, first=6) is None
    assert max(ranks) < 30


def test_one_direction_that_never_goes_is_not_fitted_for_ever(monkeypatch):
    """Errors told too small leave one that stands out of the noise whatever is added."""
    seen, _, _ = made(0, 6)
    monkeypatch.setattr(Fitting, "missing", lambda *args, **how: 1)
    found = Fitting(seen, torch.Generator().manual_seed(9)).fit(40, first=6)
    assert found is not None
    assert 6 < found.rank <= 6 + 3 * 6


def test_known_rows_sharpen_the_others():
    seen, rows, _ = made(0, 6)
    rng = torch.Generator().manual_seed(9)
    fitting = Fitting(seen, rng)
    plain, given = fitting.fit(40, None, 6), fitting.fit(40, rows[:4] / fitting.columns, 0)
    assert plain is not None
    assert given is not None
    off = []
    for fit in (plain, given):
        unit = torch.nn.functional.normalize(rows * fit.scale, dim=1)
        off.append((unit - (unit @ fit.basis) @ fit.basis.T).norm(dim=1))
    assert off[1][:4].max() < 1e-9
    assert off[1][4:].mean() < off[0][4:].mean()


@pytest.mark.parametrize("extreme", [1.0, 10.0])
def test_signals_are_the_best_fit_of_values_and_bounds(extreme: float):
    """Saturated entries bind where the fit would fall short of them, and only there."""
    seen, rows, gradient = made(0, 6)
    seen = replace(seen, sent=seen.step.sent(extreme * gradient))
    fitting = Fitting(seen, torch.Generator())
    rows = rows / fitting.columns
    gradient = fitting.signals(rows, 0.01, fitting.signals(rows, 0.3)) @ rows * fitting.unit
    off = (seen.sent - seen.step.sent(gradient)) / seen.error(gradient)
    assert off.square().mean() < 1.0
    assert (fitting.known.double().mean() < 0.9) == (extreme > 1)


class Inputs(MaskedInputs):
    """Rows as they are: nothing of a model is behind them."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words, self.model = words, type("Model", (), {"vocabulary_size": len(words)})

    def clean(self, position: int, ids: torch.Tensor) -> torch.Tensor:
        return self.words[ids]

    def inputs(self, clean: torch.Tensor, kept: torch.Tensor, rate: float) -> torch.Tensor:
        return torch.where(kept, clean, torch.zeros_like(clean))

    def slope(self, clean: torch.Tensor, kept: torch.Tensor, rate: float) -> torch.Tensor:
        return clean

    def roughly(self, position: int, some: torch.Tensor, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        return self.words[:, some], torch.zeros_like(self.words[:, some])


def masked_and_sent(seed: int = 4, known: int = 6, faint: float = 1.0) -> tuple[Fitting, Masked, torch.Tensor]:
    """Return a gradient of six masked words as AdamW shows it, the first rows with their masks, and all that enter.

    Of the last word so much less came back.
    """
    rng = torch.Generator().manual_seed(seed)
    words = torch.randn((40, 48), generator=rng, dtype=torch.float64)
    kept = torch.rand((6, 48), generator=rng) > 0.1
    rows = words[:6] * kept
    signals = 3e-6 * torch.randn((120, 6), generator=rng, dtype=torch.float64)
    signals[:, 5] *= faint
    gradient = signals @ rows
    spread = torch.full_like(gradient, 1e-4)
    step = AdamStep()
    sent = step.sent(gradient) + spread * torch.randn(gradient.shape, generator=rng, dtype=torch.float64)
    fitting = Fitting(Entries(sent, spread, step, {"0.q": 120}), rng)
    others = rows[known:] / fitting.columns
    return fitting, Masked(Inputs(words), words[:known], kept[:known], 0.0, others, fitting.columns), rows


def test_a_word_that_no_direction_shows_is_heard_in_what_the_others_leave():
    fitting, masked, rows = masked_and_sent(known=5, faint=3e-4)
    masked = replace(masked, others=rows[:0])
    left = fitting.signals(masked.rows(), 0.0)
    assert fitting.missing(left, masked.rows(), 0.0) == 0, "it stands out by itself"
    heard = overlooked(fitting, masked, left, 0.0, [0], torch.arange(40))
    assert heard[0].token == 5
    assert heard[0].gain > 1.1 * heard[1].gain


def test_words_are_not_heard_where_none_is_missing():
    fitting, masked, _ = masked_and_sent()
    heard = overlooked(fitting, masked, fitting.signals(masked.rows(), 0.0), 0.0, [0], torch.arange(6, 40))
    assert heard[0].gain < 1.5
    assert torch.tensor([one.gain for one in heard]).mean() == pytest.approx(1.0, abs=0.1)


def test_a_line_in_the_wrong_valley_is_found_again():
    """Of a line of bounds, nearly, no step leads back from the wrong side."""
    seen, rows, gradient = made(16, 12)
    gradient[8] *= 300
    fitting = Fitting(replace(seen, sent=seen.step.sent(gradient)), torch.Generator())
    rows = rows / fitting.columns

    def cost(left: torch.Tensor) -> float:
        fit = left @ rows
        return float((fitting.weights(fit, 0.0) * (fitting.target - fit).square())[8].sum())

    start = fitting.signals(rows, 0.0)
    start[8] *= -100
    stuck = fitting.signals(rows, 0.0, start)
    assert cost(stuck) > 1e4
    assert cost(fitting.freed(rows, 0.0, stuck)) < 1


def test_right_rows_explain_every_entry_and_wrong_ones_do_not():
    fitting, masked, _ = masked_and_sent()
    rng = torch.Generator().manual_seed(1)
    told = explain(fitting, masked, partial(other_tokens, masked, list(range(6))), rng)
    assert told.chi2 == pytest.approx(1.0, abs=0.05)
    assert bool((told.apart > APART).all())
    assert told.whole
    fewer = replace(masked, clean=masked.clean[1:], kept=masked.kept[1:])
    assert explain(fitting, fewer, partial(other_tokens, fewer, list(range(5))), rng).chi2 > 10
    kept = masked.kept.clone()
    kept[2, masked.clean[2].abs().argmax()] ^= True
    bent = replace(masked, kept=kept)
    told = explain(fitting, bent, partial(other_tokens, bent, list(range(6))), rng)
    assert told.chi2 > EXPLAINED, "one coordinate"


def test_a_row_that_another_word_could_stand_for_is_not_whole():
    fitting, masked, _ = masked_and_sent()
    words = masked.inputs.words.clone()
    words[20] = words[3] * (1 + 1e-9)
    twin = replace(masked, inputs=Inputs(words))
    told = explain(fitting, twin, partial(other_tokens, twin, list(range(6))), torch.Generator())
    assert told.chi2 < EXPLAINED
    assert not told.whole


@pytest.mark.parametrize("known", [6, 4])
def test_a_mask_that_is_wrong_in_a_few_places_is_mended(known: int):
    """Also beside rows that are not known: what they bring to a column is free."""
    fitting, masked, _ = masked_and_sent(known=known)
    kept = masked.kept.clone()
    for row, column in ((0, 3), (3, 30), (2, 11)):
        kept[row, column] ^= True
    again, _ = mended(fitting, replace(masked, kept=kept))
    assert (again == masked.kept)[masked.clean.abs() > 0.05].all()


def test_a_bit_bends_the_signals_to_itself_and_is_seen_through_the_other_columns():
    """Where an entry is known far better than others of its line, the fit goes through it, right or wrong."""
    fitting, masked, _ = masked_and_sent()
    column = int(masked.clean[1].abs().argmax())
    fitting.seen.spread[:, column] *= 1e-6
    kept = masked.kept.clone()
    kept[1, column] ^= True
    again, _ = mended(fitting, replace(masked, kept=kept))
    assert bool(again[1, column]) == bool(masked.kept[1, column])


def test_a_wrong_row_pulls():
    fitting, masked, _ = masked_and_sent()
    clean = masked.clean.clone()
    clean[4] = masked.inputs.words[30]
    wrong = replace(masked, clean=clean)
    pull = pulls(fitting, wrong, 0.01, fitting.signals(wrong.rows(), 0.01))
    assert int(pull.argmax()) == 4
    assert pull[4] > 6 * pull.median()


def test_the_draw_of_the_error_is_added_and_taken_off():
    """The two lie as far on either side of the gradient; where rows do not explain everything there are none."""
    rng = torch.Generator().manual_seed(0)
    left, noise, rows = (torch.randn(s, generator=rng, dtype=torch.float64) for s in ((6, 2), (6, 2), (2, 5)))
    entries = SimpleNamespace(parts=lambda stacked: {"w": stacked})
    found = DecodedChange([], None, SimpleNamespace(left=left, noise=noise, whole=True), rows, 2)  # type: ignore[arg-type]
    seen = Observation("delta", {}, None, None)  # type: ignore[arg-type]
    plain, more, less = (
        one.tensors["w"]
        for one in (found.gradient(seen, entries), *found.blurred(seen, entries))  # type: ignore[arg-type]
    )
    assert torch.allclose(plain, left @ rows)
    assert torch.allclose(more - plain, noise @ rows)
    assert torch.allclose(plain - less, noise @ rows)
    found.told.whole = False  # type: ignore[misc]
    assert found.blurred(seen, entries) == []  # type: ignore[arg-type]


def test_matrices_are_inverted_and_applied():
    rng = torch.Generator().manual_seed(0)
    rows, weights = (torch.rand(s, generator=rng, dtype=torch.float64) for s in ((3, 10), (5, 10)))
    matrices, pull = normal_matrices(rows, weights), weights[:, :3]
    whole = inverses(matrices, 0.0)
    assert torch.allclose(whole @ matrices, torch.eye(3, dtype=torch.float64).expand(5, 3, 3), atol=1e-9)
    assert torch.allclose(against(matrices, pull, 0.0), (whole @ pull[..., None])[..., 0])


def test_a_matrix_that_says_nothing_has_an_inverse_of_zero_and_the_others_theirs():
    rng = torch.Generator().manual_seed(0)
    matrices = normal_matrices(*(torch.rand(s, generator=rng, dtype=torch.float64) for s in ((3, 10), (2, 10))))
    silent = matrices.clone()
    silent[1] = 0
    found = inverses(silent, 1e-9)
    assert torch.equal(found[1], torch.zeros(3, 3, dtype=torch.float64))
    assert torch.equal(found[0], inverses(matrices, 1e-9)[0])


def test_lines_are_solved_by_their_own_weights():
    rng = torch.Generator().manual_seed(0)
    rows, weights, target = (torch.rand(s, generator=rng, dtype=torch.float64) for s in ((3, 10), (5, 10), (5, 10)))
    weights[0] *= 1e12
    weights[1, :5] *= 1e14
    found = solved(rows, weights, weights * target)
    for line in range(5):
        root = weights[line].sqrt()[:, None]
        expected = torch.linalg.lstsq(root * rows.T, root * target[line][:, None]).solution[:, 0]
        assert torch.allclose(found[line], expected, rtol=1e-5)
    twice = solved(torch.cat([rows, rows[:1]]), weights, weights * target)
    assert bool(twice.isfinite().all()), "a row that is there twice gets its signals once"
    assert torch.allclose(twice @ torch.cat([rows, rows[:1]]), found @ rows, rtol=1e-5, atol=1e-8)
    expected = torch.einsum("rd,nd,sd->nrs", rows, weights, rows)
    assert torch.allclose(normal_matrices(rows, weights), expected)


@pytest.mark.parametrize(("rate", "width"), [(0.1, 384), (0.1, 32), (0.3, 384), (0.0, 384)])
def test_no_mask_of_a_known_rate_leaves_less(rate: float, width: int):
    kept = torch.rand((10_000, width), generator=torch.Generator().manual_seed(0)) >= rate
    assert kept.double().mean(1).min() > least_kept(rate, width)
    assert least_kept(rate, width) >= least_kept(None, width) == LEAST_KEPT
    if (rate, width) == (0.1, 384):
        assert least_kept(rate, width) > 0.73, "wrong rows in reach kept 0.53 to 0.72"


def test_a_row_in_the_span_under_a_mask_that_dropout_does_not_leave_is_none(minilm):
    """The row that sixty percent of a word make lies in its span exactly."""
    clean = minilm.first_inputs(3, torch.tensor([2000])).double()
    kept = torch.rand(clean.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    basis = torch.linalg.qr(torch.where(kept, clean, torch.zeros_like(clean)).T).Q
    span = Span(basis, torch.ones(1).double(), 1, 1.0, 0, ())
    for least, inside in ((LEAST_KEPT, True), (least_kept(0.1, minilm.width), False)):
        assert bool(MaskedInputs(minilm, span, least=least).accepted(clean, kept, 0.1)[1][0]) == inside


def test_where_a_program_keeps_too_little_no_flips_are_tried(minilm):
    """One flip would make the mask right; that it keeps less than dropout does says before that it is none."""
    clean = minilm.first_inputs(3, torch.tensor([2000])).double()
    right = torch.rand(clean.shape, generator=torch.Generator().manual_seed(0)) < 0.9
    basis = torch.linalg.qr(torch.where(right, clean, torch.zeros_like(clean)).T).Q
    span = Span(basis, torch.ones(1).double(), 1, 1.0, 0, ())
    start = right.clone()
    start[0, torch.where(right[0])[0][0]] = False
    share = float(right.double().mean())
    for least, inside in ((share - 0.01, True), (share - 1e-4, False)):
        kept, found = MaskedInputs(minilm, span, least=least).accepted(clean, start, 0.1)
        assert bool(found[0]) == inside
        assert torch.equal(kept, right if inside else start)


@pytest.mark.parametrize("family", ["bert", "mpnet", "gpt2", "llama"])
def test_every_token_s_coordinates_are_roughly_what_enters(folders, family: str):
    """Kept or dropped, before a LayerNorm or behind it, with and without positions, whatever the span's scale."""
    model = load_model(ModelSpec(f"random:{folders[family]}"))
    width, ids = model.width, torch.arange(model.vocabulary_size)
    scale = torch.linspace(0.5, 2, width).double()
    basis = torch.eye(width)[:, :4].double()
    inputs = MaskedInputs(model, Span(basis, torch.ones(4).double(), 4, 1.0, 0, (), None, scale))
    some, rate = torch.tensor([0, 3, width - 1]), 0.1 if family != "llama" else 0.0
    for position in (0, 3):
        clean = inputs.clean(position, ids)
        every = torch.ones_like(clean, dtype=torch.bool)
        kept = inputs.inputs(clean, every, rate)
        dropped = kept - inputs.slope(clean, every, rate)
        rough = inputs.roughly(position, some, rate)
        torch.testing.assert_close(rough[0].double(), kept[:, some], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rough[1].double(), dropped[:, some], rtol=1e-4, atol=1e-4)


def test_of_more_rows_in_reach_than_directions_the_nearest_are_taken(minilm):
    """Five of ten lie in a span of five, the others outside: six tenths of five come first."""
    seen = entries(seen_of(minilm, sample_batch(minilm, 4, 1), ADAMW), 0)
    assert seen is not None
    decoding = _Decoding(minilm, seen, Search(1, 200, 512, 0.1), torch.Generator())
    ids = torch.arange(2000, 2010)
    clean = minilm.first_inputs(3, ids).double()
    basis = torch.linalg.qr(clean[:5].T).Q
    span = Span(basis, torch.ones(5).double(), 5, 1.0, 0, (), torch.full((5,), 1e-4).double())
    every = torch.ones(minilm.width, dtype=torch.bool)
    decoding.rows = [Row(token, 3, every, row) for token, row in zip(ids.flip(0).tolist(), clean.flip(0), strict=True)]
    decoding.choose(MaskedInputs(minilm, span), 0)
    assert len(decoding.rows) == 3
    assert all(row.token < 2005 for row in decoding.rows)


def test_what_a_fit_brings_back_to_other_rows_of_its_space_is_the_same_product():
    rng = torch.Generator().manual_seed(0)
    left, rows, mix = (torch.randn(s, generator=rng).double() for s in ((9, 4), (4, 12), (4, 4)))
    fit = LowRank(rows.T, rows[0], rows[0], left, rows)
    torch.testing.assert_close(fit.signals(mix @ rows) @ mix @ rows, left @ rows)


@pytest.mark.minilm
@pytest.mark.parametrize(("size", "owed"), [(None, 2), (2, 2), (3, 3)])
def test_no_more_copies_are_tried_than_there_are_sentences_or_positions_show(minilm, size, owed):
    """With the first token unknown and two hundred directions that stand out, of what two sentences left."""
    seen = entries(seen_of(minilm, sample_batch(minilm, 4, 1), ADAMW), 0)
    assert seen is not None
    decoding = _Decoding(minilm, seen, Search(size, 200, 512, 0.1), torch.Generator())
    every = torch.ones(3, dtype=torch.bool)
    decoding.rows, decoding.missing = [Row(t, p, every, torch.ones(3)) for t, p in ((5, 1), (6, 1), (7, 2))], 200
    (first,) = {(one.token, one.position) for one in decoding.owed()}
    assert first == (minilm.special.prefix[0], 0)
    assert decoding.copies(decoding.owed()) == owed


@pytest.mark.minilm
def test_a_copy_of_the_first_token_is_owed_until_there_are_as_many_as_sentences(minilm):
    batch = sample_batch(minilm, 4, 2)
    seen = entries(seen_of(minilm, batch, ADAMW), 0)
    assert seen is not None
    decoding = _Decoding(minilm, seen, Search(2, 200, 512, 0.1), torch.Generator())
    start, end = minilm.special.prefix[0], minilm.special.suffix[0]
    texts = [(start, 5, end), (start, 6, 7, end)]
    rows = [Row(t, p, torch.ones(3, dtype=torch.bool), torch.ones(3)) for text in texts for p, t in enumerate(text)]
    for gone, (short, whole) in {None: (0, True), 0: (1, False), 1: (0, False), 2: (0, False), 6: (0, False)}.items():
        decoding.rows = [row for n, row in enumerate(rows) if n != gone]
        assert [(one.token, one.position) for one in decoding.owed()] == [(start, 0)] * short
        assert decoding.complete() == whole


@pytest.mark.minilm
@pytest.mark.parametrize("training", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_one_step_is_read_back_exactly_and_proven(minilm, training: LocalTraining):
    batch = sample_batch(minilm, 4, 1)
    found = Decode()(seen_of(minilm, batch, training, Given()), stream(0, "attack"))
    assert found.sequences == (tuple(batch.sequences()[0]),)
    assert found.certificates == ("proven",)
    assert 0.8 < found.details["chi2"] < EXPLAINED


@pytest.mark.minilm
def test_a_change_of_another_optimizer_than_told_proves_nothing(minilm):
    batch = sample_batch(minilm, 4, 1)
    seen = seen_of(minilm, batch, ADAMW)
    wrong = replace(seen, knowledge=replace(seen.knowledge, training=replace(ADAMW, learning_rate=6e-5)))
    found = Decode()(wrong, stream(0, "attack"))
    assert "proven" not in (found.certificates or ())


@pytest.mark.parametrize(("rows", "missing", "heard"), [(23, 55, True), (60, 55, False), (3, 384, False)])
def test_few_rows_are_listened_for_whatever_stands_out_of_them(rows: int, missing: int, heard: bool):
    """Without its loudest row a batch of 24 leaves 55 directions: wrong bits of the others. Not where all stand out."""
    state = _Decoding.__new__(_Decoding)
    state.rows, state.missing, state.model = [object()] * rows, missing, SimpleNamespace(width=384)
    state.owed = lambda: ["the first token"]
    state.tried = lambda inputs, more: bool(setattr(state, "missing", 0)) or True
    state.listen(None)
    assert (state.missing == 0) == heard


def test_entries_tell_how_unsure_they_are_without_those_that_were_left_out():
    sent = torch.tensor([[2.0, -4.0, 0.0, 1.0]], dtype=torch.double)
    spread = torch.tensor([[1.0, 1.0, 1.0, 100.0]], dtype=torch.double)
    assert Entries(sent, spread, PlainStep(), {"q": 1}).unsure() == 0.25
    assert Entries(torch.zeros_like(sent), spread, PlainStep(), {"q": 1}).unsure() == math.inf


@pytest.mark.parametrize(("known", "kept"), [([], 2), ([0], 1)])
def test_first_rows_stay_though_all_directions_stand_out_still(monkeypatch, known, kept):
    """The loudest row may not be among them; rows that are found beside others must explain something."""
    state = _Decoding.__new__(_Decoding)
    state.rows, state.missing, state.rng = list(known), 384, None
    state.how, state.model = SimpleNamespace(rate=0.1), SimpleNamespace(width=384)
    state.choose = state.drop = state.count = lambda *given: None
    state.beside = lambda *given: SimpleNamespace(rows=lambda: None)
    monkeypatch.setattr(decoded, "find_rows", lambda *given: [*known, *range(10, 10 + 2 - len(known))])
    monkeypatch.setattr(decoded, "look_harder", lambda inputs, how, rows, *given: rows)
    fit = SimpleNamespace(signals=lambda rows: torch.zeros(1, 2))
    state.look(SimpleNamespace(span=SimpleNamespace(rank=9)), fit, 1)
    assert len(state.rows) == kept


@pytest.mark.parametrize("wrong", [0, 3])
def test_what_a_wrong_mask_leaves_goes_with_its_row(wrong):
    """Closed form: a coordinate too much leaves one direction, which comes back to the lines as the row does."""
    rng = torch.Generator().manual_seed(wrong)
    rows, left = (torch.randn(shape, generator=rng, dtype=torch.double) for shape in ((5, 40), (60, 5)))
    sent = left @ rows + 1e-4 * torch.randn(60, 40, generator=rng, dtype=torch.double)
    fitting = Weighted(Entries(sent, torch.full_like(sent, 1e-4), PlainStep(), {"q": 60}))
    read = (rows / fitting.columns).clone()
    assert astray(fitting, read, fitting.signals(read, 0.0))[1] < 0.5
    read[wrong, 7] = 0
    at, likeness = astray(fitting, read, fitting.signals(read, 0.0))
    assert at == wrong
    assert likeness > 0.9


@pytest.mark.parametrize(("leaves", "kept"), [((50.0, 400.0, 900.0), 4), ((50.0, 400.0, 2.0), 6)])
def test_a_round_that_makes_complete_rows_worse_is_taken_back(monkeypatch, leaves, kept):
    """Rows 4, 5 and 6 in three rounds; the answer is of the round that left least, and rounds that go on doubt."""
    asked: list[int] = []

    class Rounds(_Decoding):
        def __init__(self, *given: object) -> None:
            self.rows, self.missing, self.how, self.doubted = list(range(3)), 1, SimpleNamespace(least=0.0), set()
            self.most = iter(leaves)

        def fit(self, inputs, beyond):
            return SimpleNamespace(rank=1, span=lambda layer: None)

        def look(self, inputs, fit, effort):
            self.rows = [*self.rows, len(self.rows)]

        def complete(self):
            return True

        def explained(self, inputs):
            return SimpleNamespace(chi2=next(self.most), whole=False, left=torch.zeros(1, len(self.rows)))

        def masked(self, inputs, others=None):
            return SimpleNamespace(entering=lambda: torch.zeros(len(self.rows), 3))

        def ends(self, told, stays):
            return len(self.rows) == 6

        def doubt(self, inputs, told):
            asked.append(len(self.rows))

        def beside(self, inputs, fit):
            return None

        def mended(self, masked, floors, left=None):
            return None, None

        def keep(self, masks):
            pass

    monkeypatch.setattr(decoded, "_Decoding", Rounds)
    seen = SimpleNamespace(rounded=None, weights=None)
    monkeypatch.setattr(decoded, "MaskedInputs", lambda *given: object())
    found = decoded.decode_change(SimpleNamespace(width=40), seen, Search(1, 1, 1), torch.Generator())
    assert found is not None
    assert len(found.rows) == kept
    assert found.told.chi2 == min(leaves)
    assert found.rank == kept + (kept == 6)
    assert asked == [4, 5]


def test_a_row_whose_mask_was_read_wrongly_is_put_back_once():
    rng = torch.Generator().manual_seed(0)
    rows, left = (torch.randn(shape, generator=rng, dtype=torch.double) for shape in ((5, 40), (60, 5)))
    state = _Decoding.__new__(_Decoding)
    state.fitting = Weighted(Entries(left @ rows, torch.full((60, 40), 1e-4).double(), PlainStep(), {"q": 60}))
    state.doubted, kept = set(), torch.ones(5, 40, dtype=torch.bool)
    kept[3, 7] = False
    read = [Row(token, 0, mask, row) for token, (mask, row) in enumerate(zip(kept, rows, strict=True))]
    seen = torch.stack([row.clean * row.kept for row in read]) / state.fitting.columns
    state.masked = lambda inputs: SimpleNamespace(rows=lambda: seen)
    told = SimpleNamespace(left=state.fitting.signals(seen, 0.0) * state.fitting.lines)
    for remain in ([0, 1, 2, 4], [0, 1, 2, 3, 4]):
        state.rows = list(read)
        state.doubt(None, told)
        assert [row.token for row in state.rows] == remain
