"""Compression: what is sent is what the name says, tensor by tensor, and the input is left as it was."""

from __future__ import annotations

import pytest
import torch

from gradaudit.errors import BadInputError
from gradaudit.registry import build
from gradaudit.streams import stream

RNG = torch.Generator().manual_seed(0)
TENSORS = {"a": torch.randn(30, 40, generator=RNG), "b": torch.randn(7, generator=RNG), "zero": torch.zeros(5)}


def sent(name: str, **fields) -> dict[str, torch.Tensor]:
    before = {n: t.clone() for n, t in TENSORS.items()}
    out = build("defense", name, fields).on_update(TENSORS, stream(0, "defense"))
    assert all(torch.equal(before[n], t) for n, t in TENSORS.items())
    assert {n: (t.shape, t.dtype) for n, t in out.items()} == {n: (t.shape, t.dtype) for n, t in TENSORS.items()}
    return out


def test_sign_sends_signs():
    out = sent("sign")
    assert torch.equal(out["a"], torch.where(TENSORS["a"] > 0, 1.0, -1.0))
    assert not bool(out["zero"].any())


@pytest.mark.parametrize("keep", [0.01, 0.1, 1.0])
def test_topk_keeps_the_largest_and_nothing_else(keep: float):
    out, whole = sent("topk", keep=keep)["a"], TENSORS["a"]
    kept = out != 0
    assert int(kept.sum()) == round(keep * whole.numel())
    assert torch.equal(out[kept], whole[kept])
    if keep < 1:
        assert float(whole[kept].abs().min()) >= float(whole[~kept].abs().max())


@pytest.mark.parametrize("keep", [0.005, 0.1, 0.7, 1.0])
def test_topk_of_the_whole_update_compares_tensors_with_each_other(keep: float):
    out = sent("topk", keep=keep, whole=True)
    every = torch.cat([t.flatten() for t in TENSORS.values()])
    kept = torch.cat([t.flatten() for t in out.values()])
    count = max(1, round(keep * len(every)))
    assert torch.equal(
        kept.abs().sort(descending=True).values[:count], every.abs().sort(descending=True).values[:count]
    )
    assert torch.equal(kept[kept != 0], every[kept != 0])
    assert int((kept != 0).sum()) <= count
    scaled = {"a": 1e-6 * TENSORS["a"], "b": TENSORS["b"]}
    few = build("defense", "topk", {"keep": 7 / 1207, "whole": True}).on_update(scaled, stream(0, "x"))
    assert not bool(few["a"].any()), "small tensors may be sent by nobody"
    assert torch.equal(few["b"], scaled["b"])


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "ties"])
@pytest.mark.parametrize("size", [10, 9_000, 150_000])
def test_the_largest_are_found_whatever_a_sample_says(size: int, kind: str):
    draw = torch.randn(1, size, generator=torch.Generator().manual_seed(size))
    values = {"normal": draw, "heavy tails": draw.exp() ** 3 * draw.sign(), "ties": (3 * draw).round()}[kind]
    for keep in (0.0005, 0.01, 0.1, 0.5, 0.999, 1.0):
        out = build("defense", "topk", {"keep": keep}).on_many(values, RNG)
        count = max(1, round(keep * size))
        largest = values.abs().sort(descending=True).values[0, :count]
        assert torch.equal(out.abs().sort(descending=True).values[0, :count], largest)
        assert int((out != 0).sum()) == int((largest != 0).sum())
        assert torch.equal(out[out != 0], values[out != 0])


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_are_off_by_half_a_step_at_most(bits: int):
    out, whole = sent("quantize", bits=bits)["a"], TENSORS["a"]
    step = float(whole.abs().max()) / (2 ** (bits - 1) - 1)
    assert float((out - whole).abs().max()) <= step / 2 * 1.001
    assert len(out.unique()) <= 2**bits - 1
    assert torch.equal(sent("quantize", bits=bits)["zero"], TENSORS["zero"])


def test_sixteen_bits_are_bfloat16():
    assert torch.equal(sent("quantize", bits=16)["a"], TENSORS["a"].bfloat16().float())


@pytest.mark.parametrize(
    ("name", "fields"), [("topk", {"keep": 0.0}), ("topk", {"keep": 1.5}), ("quantize", {"bits": 7})]
)
def test_what_makes_no_sense_is_refused(name: str, fields: dict):
    with pytest.raises(BadInputError, match=f"defense '{name}'"):
        build("defense", name, fields)


def test_relative_noise_scales_with_the_tensor():
    big = {"a": 100 * TENSORS["a"]}
    noise = [
        build("defense", "gaussian", {"sigma": 0.5, "relative": True}).on_update(t, stream(0, "x"))["a"] - t["a"]
        for t in ({"a": TENSORS["a"]}, big)
    ]
    assert float(noise[0].std()) == pytest.approx(0.5 * float(TENSORS["a"].square().mean().sqrt()), rel=0.1)
    assert torch.allclose(100 * noise[0], noise[1], atol=1e-4)
