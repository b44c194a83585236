"""Gradients in few bits, with noise or with entries left out, read as entries with errors; dropout on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.data.spec import DataSpec
from gradaudit.data.text import SAMPLE, load_rows, make_batch
from gradaudit.leakage.decoding.rows import MaskedInputs
from gradaudit.leakage.uneven.entries import entries
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import LocalTraining
from tiny_models import batch_of, seen_of, sentences


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


def made_coarse(load, change):
    """Return the exact gradient of a block's q, k, v, and the entries of what a change of each matrix leaves."""
    model = load("bert")
    seen = seen_of(Client(model, dropout=True), batch_of(model, sentences((5, 6), 1)), "0:q,k,v")
    exact = torch.cat([t.double() for t in seen.tensors.values()])
    return exact, entries(replace(seen, tensors={name: change(t) for name, t in seen.tensors.items()}), 0)


def integers(value: torch.Tensor) -> torch.Tensor:
    step = value.abs().max() / 127
    return (value / step).round() * step


def subnormal(value: torch.Tensor) -> torch.Tensor:
    scale = 2.0 ** round(math.log2(2e-5 / float(value.std())))
    return (value * scale).half().float() / scale


NOISE = {
    "bf16": lambda t: t.bfloat16().float(),
    "fp16": lambda t: (t * 2**16).half().float() / 2**16,
    "fp16, below its normal numbers": subnormal,
    "int8": integers,
    "noise": lambda t: t + 0.05 * t.std() * torch.randn(t.shape, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("kind", NOISE)
def test_errors_are_those_that_were_made(load, kind):
    exact, found = made_coarse(load, NOISE[kind])
    assert found is not None
    off = (found.sent - exact) / found.spread
    # noise is estimated from a 32 x 32 matrix; roundings are known
    assert float(off.square().mean()) == pytest.approx(1, abs=0.25 if kind == "noise" else 0.12)


def test_a_change_of_weights_in_bfloat16_is_known_to_their_grid(folders):
    """At a rate that moves most weights by some steps of their grid."""
    model = load_model(ModelSpec(f"random:{folders['bert']}", weights="bfloat16"))
    batch = batch_of(model, sentences((5, 6), 1))
    own = seen_of(Client(model, LocalTraining(precision="bf16-weights")), batch, "0:q,k,v")
    exact = torch.cat([t.double() for t in own.tensors.values()])
    rate = float(model.parameters()[model.views(0, "q")[0].parameter].detach().std() / exact.std())
    found = entries(seen_of(Client(model, LocalTraining("sgd", rate, precision="bf16-weights")), batch, "0:q,k,v"), 0)
    assert found is not None
    assert found.weights == found.rounded == torch.bfloat16
    told = 1 / found.spread.square()
    scale = float((told * found.sent * exact).sum() / (told * exact.square()).sum())
    assert scale == pytest.approx(1, abs=2**-8), "torch rounds the rate to the weights' type, which scales all entries"
    assert float((told * (found.sent - scale * exact).square()).mean()) == pytest.approx(1, abs=0.12)


def test_a_step_of_adam_on_weights_in_bfloat16_tells_signs_alone(folders):
    model = load_model(ModelSpec(f"random:{folders['bert']}", weights="bfloat16"))
    how = LocalTraining("adamw", 5e-5, precision="bf16-weights")
    assert entries(seen_of(Client(model, how), batch_of(model, sentences((5, 6), 1)), "0:q,k,v"), 0) is None


def test_rounded_inputs_are_an_error_until_their_rows_are_known(load):
    """A product with inputs rounded to bf16 is off by at most what `unread` adds; exact entries add nothing.

    A unit in the last place is 0.43 of the square of eps times the value, and half of `own` is for outliers that noise
    has none of: 0.21.
    """
    exact, found = made_coarse(load, NOISE["bf16"])
    assert found is not None
    assert found.unread() is found
    rng = torch.Generator().manual_seed(0)
    signals, inputs = (torch.randn(s, generator=rng, dtype=torch.double) for s in ((len(exact), 9), (9, 32)))
    product, rounded = signals @ inputs, signals @ inputs.bfloat16().double()
    told = replace(found, sent=rounded, spread=torch.zeros_like(exact), rounded=torch.bfloat16).unread()
    assert float(((rounded - product) / told.spread).square().mean()) == pytest.approx(0.21, abs=0.07)


def test_entries_that_were_left_out_say_nothing_and_the_others_all(load):
    keep = torch.Generator().manual_seed(0)
    exact, found = made_coarse(load, lambda t: t * (torch.rand(t.shape, generator=keep) < 0.3))
    assert found is not None
    there = found.sent != 0
    assert 0.2 < float(there.double().mean()) < 0.4
    assert torch.equal(found.sent[there], exact[there])
    assert bool((found.spread[~there] > 1e3 * exact.abs().max()).all())
    assert bool((found.spread[there] < 1e-5 * exact.abs().max()).all())


@pytest.mark.parametrize("change", [torch.clone, torch.sign, torch.zeros_like], ids=["exact", "signs", "nothing"])
def test_exact_gradients_and_signs_are_left_to_others(load, change):
    assert made_coarse(load, change)[1] is None


CLIENTS = {
    "bf16": {"training": LocalTraining(precision="bf16")},
    "bf16-weights": {"training": LocalTraining(precision="bf16-weights")},
    "pruned": {"defenses": ("random-pruning", {"rate": 0.75})},
}


@pytest.mark.minilm
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_sentence_is_read_exactly_with_dropout_on(minilm, kind):
    if kind == "bf16-weights":
        minilm = load_model(ModelSpec("minilm", weights="bfloat16"))
    rows = load_rows(DataSpec(path=str(SAMPLE), label="label"), Path.cwd())
    assert rows.labels is not None
    batch = make_batch(minilm, rows.texts[4:5], rows.labels[4:5])
    how = dict(CLIENTS[kind])
    if "defenses" in how:
        how["defenses"] = (build("defense", *how["defenses"]),)
    seen = seen_of(Client(minilm, dropout=True, freeze=("embeddings",), **how), batch, "0:q,k,v")
    found = Decode()(seen, stream(0, "attack"))
    assert found.sequences == (tuple(batch.sequences()[0]),)
    assert found.certificates is not None
    assert found.certificates[0] in ("proven", "likely")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_masked_rows_are_rounded_as_torch_rounds_them(kind, rate):
    """Oracle: dropout itself. A factor that is off by 3e-8 brings some of a million coordinates to another number."""
    rows = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)).abs() + 1e-3
    torch.manual_seed(0)
    dropped = torch.nn.functional.dropout(rows, rate, training=True).to(kind).double()
    inputs = MaskedInputs.__new__(MaskedInputs)
    inputs.model, inputs._rounded, inputs._weights = SimpleNamespace(dropout_before_norm=False), kind, None
    assert torch.equal(inputs.inputs(rows.double(), dropped != 0, rate), dropped)
