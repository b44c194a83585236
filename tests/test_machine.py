"""Products are given to oneDNN only where they stay float32 products, and only on processors that gain by it."""

from __future__ import annotations

import pytest
import torch

from gradaudit import machine
from gradaudit.machine import multiplied_by, multiply_by_onednn

MATMUL = torch.backends.mkldnn.matmul


@pytest.fixture(autouse=True)
def put_back():
    before = MATMUL.fp32_precision
    yield
    MATMUL.fp32_precision = before


def test_products_are_as_exact_after_as_before(monkeypatch):
    monkeypatch.setattr(machine, "_is_amd", lambda: True)
    rng = torch.Generator().manual_seed(1)
    x, w = torch.randn(300, 1024, generator=rng), torch.randn(1024, 700, generator=rng)
    exact = x.double() @ w.double()

    def error() -> float:
        return float((x @ w - exact).abs().max() / exact.abs().max())

    before = error()
    multiply_by_onednn()  # on a processor that rounds to bfloat16 it declines by itself
    assert error() < 4 * before


def test_what_passes_the_trial_is_taken_and_said(monkeypatch):
    monkeypatch.setattr(machine, "_is_amd", lambda: True)
    monkeypatch.setattr(machine, "_rounding", lambda: 1e-7)
    MATMUL.fp32_precision = "ieee"
    assert multiply_by_onednn()
    assert MATMUL.fp32_precision == "bf16"
    assert multiplied_by() == "oneDNN"


def test_a_torch_without_the_setting_is_left_alone(monkeypatch):
    monkeypatch.setattr(machine, "_matmul", lambda: None)
    assert not multiply_by_onednn()
    assert multiplied_by() in ("MKL", "BLAS")


def test_a_processor_that_rounds_is_left_as_it_was(monkeypatch):
    monkeypatch.setattr(machine, "_is_amd", lambda: True)
    monkeypatch.setattr(machine, "_rounding", lambda: 1e-3)
    MATMUL.fp32_precision = "ieee"
    assert not multiply_by_onednn()
    assert MATMUL.fp32_precision == "ieee"
    assert multiplied_by() != "oneDNN"


def test_other_makers_are_left_alone(monkeypatch):
    monkeypatch.setattr(machine, "_is_amd", lambda: False)
    before = MATMUL.fp32_precision
    assert not multiply_by_onednn()
    assert MATMUL.fp32_precision == before


def test_the_trial_tells_bfloat16_from_float32(monkeypatch):
    assert machine._rounding() < machine._ROUNDING / 5
    plain = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: plain(a.bfloat16(), b.bfloat16()).float())
    assert machine._rounding() > 10 * machine._ROUNDING
