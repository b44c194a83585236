"""Defenses: noise of the right size, proved by a test that rejects other sizes, and nothing else touched."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scipy.stats import kstest

from gradaudit.client.client import Client
from gradaudit.defense_traits import ANYTHING, deviation_told
from gradaudit.defenses.base import UpdateDefense
from gradaudit.defenses.noise import Gaussian
from gradaudit.errors import BadInputError
from gradaudit.registry import build, describe, known
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining
from tiny_models import batch_of, seen_of, sentences


def some_tensors() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn((40, 50), generator=rng),
        "b": torch.randn((700,), generator=rng, dtype=torch.float64),
        "c": torch.randn((3, 5), generator=rng).to(torch.bfloat16),
        "d": torch.randn((30, 40), generator=rng).T,
    }


@pytest.mark.parametrize("sigma", [1e-4, 0.01, 3.0])
@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("sgd", 0.1)], ids=["gradient", "delta"])
def test_gaussian_noise_has_the_stated_sigma_in_what_is_sent(load, sigma, training):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6), 1))
    plain = Client(model, training).update(batch, stream(0, "client"))
    defended = Client(model, training, defenses=(Gaussian(sigma),)).update(batch, stream(0, "client"))
    noise = torch.cat([(defended.tensors[n].double() - t.double()).flatten() for n, t in plain.tensors.items()])
    fine = noise[:20_000] if sigma > 1e-3 else noise[noise != 0][:20_000]
    assert kstest(fine.numpy(), "norm", args=(0, sigma)).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert kstest(fine.numpy(), "norm", args=(0, wrong * sigma)).pvalue < 1e-9
    assert abs(float(noise.mean())) < 5 * sigma / len(noise) ** 0.5


def test_noise_is_independent_between_coordinates_tensors_and_places(load):
    twins = {"a": torch.zeros(3000), "b": torch.zeros(3000)}
    out = Gaussian(1.0).on_update(twins, stream(0, "x"))
    for one, other in ((out["a"], out["b"]), (out["a"][1:], out["a"][:-1])):
        assert abs(float((one * other).mean())) < 0.1
    model = load("bert")
    batch = batch_of(model, sentences((4,), 1))
    tensors = [
        Client(model, defenses=(Gaussian(1.0),) * n).update(batch, stream(0, "client")).tensors for n in (0, 1, 2)
    ]
    name = "bert.encoder.layer.0.output.dense.weight"
    first, second = tensors[1][name] - tensors[0][name], tensors[2][name] - tensors[1][name]
    assert abs(float((first * second).mean())) < 5 / first.numel() ** 0.5, "two defenses share no noise"


@pytest.mark.parametrize("name", sorted(n for n, d in known("defense").items() if d.acts_on == "update"))
def test_every_update_defense_keeps_its_contract(name):
    defense = build("defense", name, {})
    assert isinstance(defense, UpdateDefense)
    tensors = some_tensors()
    before = {n: t.clone() for n, t in tensors.items()}
    out = defense.on_update(tensors, stream(0, "x"))
    again = defense.on_update(tensors, stream(0, "x"))
    other = defense.on_update(tensors, stream(1, "x"))
    assert list(out) == list(tensors)
    for n, t in tensors.items():
        assert torch.equal(t, before[n]), "wrote into its input"
        assert (out[n].shape, out[n].dtype) == (t.shape, t.dtype)
        assert torch.equal(out[n], again[n])
        assert out[n].data_ptr() != t.data_ptr()
    assert any(not torch.equal(out[n], other[n]) for n in out) or name != "gaussian"
    assert type(defense).__doc__
    for field in dataclasses.fields(defense):
        assert field.metadata["about"]


def test_defenses_are_recorded_in_order_and_shown_only_when_given(load):
    model = load("gpt2")
    batch = batch_of(model, sentences((4,), 1))
    client = Client(model, defenses=(Gaussian(0.5), Gaussian(0.25)))
    expected = (
        {"name": "gaussian", "sigma": 0.5, "relative": False},
        {"name": "gaussian", "sigma": 0.25, "relative": False},
    )
    assert client.update(batch, stream(0, "client")).defenses == expected
    assert seen_of(client, batch).knowledge.defenses == expected
    assert seen_of(client, batch, given=Given(defenses=False)).knowledge.defenses is None
    assert seen_of(Client(model), batch).knowledge.defenses == ()


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan")])
def test_a_sigma_that_is_none_is_refused(sigma):
    with pytest.raises(BadInputError, match="sigma must be above 0"):
        build("defense", "gaussian", {"sigma": sigma})


@pytest.mark.parametrize("scale", [1e-3, 2.0])
def test_laplace_noise_has_the_stated_scale(scale):
    tensors = {"a": torch.zeros(100, 300)}
    noise = build("defense", "laplace", {"scale": scale}).on_update(tensors, stream(0, "x"))["a"].flatten().numpy()
    assert kstest(noise, "laplace", args=(0, scale)).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert kstest(noise, "laplace", args=(0, wrong * scale)).pvalue < 1e-9


@pytest.mark.parametrize("per_tensor", [False, True])
def test_clipping_bounds_the_norm_and_keeps_the_direction(per_tensor):
    tensors = {name: value.float() for name, value in some_tensors().items()} | {"small": torch.full((4,), 1e-3)}
    norms = {name: float(value.norm()) for name, value in tensors.items()}
    whole = sum(n * n for n in norms.values()) ** 0.5
    out = build("defense", "clip", {"norm": 2.0, "per_tensor": per_tensor}).on_update(tensors, stream(0, "x"))
    for name, value in tensors.items():
        factor = min(1.0, 2.0 / (norms[name] if per_tensor else whole))
        torch.testing.assert_close(out[name], value * factor, rtol=1e-5, atol=0)
    loose = build("defense", "clip", {"norm": 1e6, "per_tensor": per_tensor}).on_update(tensors, stream(0, "x"))
    assert all(torch.equal(loose[name], value) for name, value in tensors.items())
    zero = {"z": torch.zeros(3)}
    assert torch.equal(build("defense", "clip", {}).on_update(zero, stream(0, "x"))["z"], zero["z"])


@pytest.mark.parametrize("scale", [1e-2, 5.0])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gaussian", {"sigma": 0.3}),
        ("gaussian", {"sigma": 0.3, "relative": True}),
        ("normalized-gaussian", {"sigma": 0.02}),
        ("laplace", {"scale": 0.5}),
    ],
)
def test_one_who_is_told_of_noise_knows_its_size(name, values, scale):
    """Oracle: two draws of the same tensor differ by noise alone."""
    noise, clip = build("defense", name, values), {"name": "clip", "norm": 1.0}
    tensor = {"a": scale * torch.randn((200, 300), generator=torch.Generator().manual_seed(0))}
    one, other = (noise.on_update(tensor, stream(seed, "x"))["a"] for seed in (0, 1))
    known = deviation_told([clip, describe(noise)], one)
    assert known == pytest.approx(float((one - other).std()) / 2**0.5, rel=0.02)
    assert deviation_told([clip, describe(noise)], one, changed=True) == known
    assert deviation_told([describe(noise), clip], one) is None
    assert deviation_told([{"name": "top-k"}, describe(noise)], one) is None


def test_one_who_is_told_of_dp_sgd_knows_the_size_of_its_noise():
    guard = build("defense", "dp-sgd", {"clip": 0.5, "noise_multiplier": 0.8})
    zero = {"a": torch.zeros(200, 300)}
    sent = guard.on_examples(iter([{"a": torch.zeros(4, 200, 300)}]), zero, 4.0, stream(0, "x"))["a"]
    assert deviation_told([describe(guard)], sent, 4) == pytest.approx(float(sent.std()), rel=0.02)
    assert deviation_told([describe(guard)], sent) is None
    assert deviation_told([describe(guard)], sent, 4, changed=True) is None, "it lies in the gradients of the steps"
    assert deviation_told((), sent) is None


@pytest.mark.parametrize(("name", "values"), [("laplace", {"scale": 0.0}), ("clip", {"norm": -1.0})])
def test_a_scale_or_bound_that_is_none_is_refused(name, values):
    with pytest.raises(BadInputError, match=f"defense '{name}'.*must be above 0"):
        build("defense", name, values)


def test_an_attack_reckons_with_the_defenses_it_names_and_no_others():
    grab = build("attack", "grab", {})
    assert grab.reckons_with("random-pruning")
    assert not grab.reckons_with("dp-sgd")
    assert not build("attack", "grab", {"counter": False}).reckons_with("random-pruning")
    assert build("attack", "blind", {}).reckons_with("dp-sgd")
    for attack in known("attack").values():
        assert attack.handles <= ANYTHING, attack.name
