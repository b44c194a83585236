"""The mean update of a round: without noise it is that of the clients themselves, with noise it has its law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import kstest, laplace, norm
from torch import Tensor

from gradaudit.client.client import Client
from gradaudit.client.mean_update import mean_update
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import LocalTraining
from tiny_models import batch_of, sentences

LENGTHS = (4, 6, 5, 7, 3, 4, 6, 5)


def defenses(*tables: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(build("defense", t["name"], {k: v for k, v in t.items() if k != "name"}) for t in tables)


def both(model: Any, clients: int, **how: Any) -> tuple[Tensor, Tensor]:
    """The clients' own updates averaged, and the mean update, with another stream."""
    batch = batch_of(model, sentences(LENGTHS, 1))
    own = Client(model, clients=clients, **how).update(batch, stream(0, "own")).tensors
    mean = mean_update(Client(model, **how), batch, clients, stream(1, "mean"))
    assert mean.tensors.keys() == own.keys()
    return tuple(torch.cat([t.double().flatten() for t in some.values()]) for some in (own, mean.tensors))  # type: ignore[return-value]


@pytest.mark.parametrize("clients", [1, 2, 8])
@pytest.mark.parametrize(
    "tables",
    [
        (),
        ({"name": "sign"},),
        ({"name": "topk", "keep": 0.05},),
        ({"name": "quantize", "bits": 8},),
        ({"name": "clip", "norm": 0.1},),
        ({"name": "clip", "norm": 0.05, "per_tensor": True},),
        ({"name": "topk", "keep": 0.2}, {"name": "clip", "norm": 0.1}),
        ({"name": "dp-sgd", "clip": 0.1, "noise_multiplier": 0.0, "poisson": False},),
    ],
)
def test_without_noise_it_is_the_mean_of_the_clients(load, clients, tables):
    own, mean = both(load("bert"), clients, defenses=defenses(*tables))
    # a coordinate that is zero but for rounding may have another sign, or lie at another side of a threshold
    steps = {t["name"] for t in tables} & {"sign", "topk", "quantize"}
    assert float(((own - mean).abs() > 1e-5 * own.abs().max()).double().mean()) < (2e-2 if steps else 1e-9)


@pytest.mark.parametrize("clients", [4, 8])
@pytest.mark.parametrize(
    ("tables", "before", "std"),
    [
        (({"name": "gaussian", "sigma": 0.3},), (), 0.3),
        (({"name": "clip", "norm": 0.1}, {"name": "gaussian", "sigma": 0.3}), ({"name": "clip", "norm": 0.1},), 0.3),
    ],
)
def test_gaussian_noise_of_the_clients_adds_up_to_less(load, clients, tables, before, std):
    model = load("bert")
    _, noisy = both(model, clients, defenses=defenses(*tables))
    _, plain = both(model, clients, defenses=defenses(*before))
    noise, size = (noisy - plain)[:20_000], std / clients**0.5
    assert kstest(noise.numpy(), norm(scale=size).cdf).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert kstest(noise.numpy(), norm(scale=wrong * size).cdf).pvalue < 1e-9


@pytest.mark.parametrize("clients", [4, 8])
def test_noise_of_dp_sgd_adds_up_to_less_too(load, clients):
    model = load("bert")
    table = {"name": "dp-sgd", "clip": 0.1, "poisson": False}
    own, noisy = both(model, clients, defenses=defenses(table | {"noise_multiplier": 3.0}))
    _, plain = both(model, clients, defenses=defenses(table | {"noise_multiplier": 0.0}))
    noise, size = (noisy - plain)[:20_000], 3.0 * 0.1 * clients**0.5 / len(LENGTHS)
    assert kstest(noise.numpy(), norm(scale=size).cdf).pvalue > 1e-3
    assert kstest((own - plain)[:20_000].numpy(), norm(scale=size).cdf).pvalue > 1e-3, "as the clients one by one"
    for wrong in (2 / 3, 3 / 2):
        assert kstest(noise.numpy(), norm(scale=wrong * size).cdf).pvalue < 1e-9


def test_normalized_noise_is_that_of_the_clients(load):
    model = load("bert")
    _, noisy = both(model, 8, defenses=defenses({"name": "normalized-gaussian", "sigma": 0.5}))
    units, _ = both(model, 8, defenses=defenses({"name": "normalized-gaussian", "sigma": 1e-9}))
    noise = (noisy - units)[:20_000]
    assert kstest(noise.numpy(), norm(scale=0.5 / 8**0.5).cdf).pvalue > 1e-3


def test_laplace_noise_of_the_clients_is_a_mean_of_laplace_draws(load):
    model = load("bert")
    _, noisy = both(model, 4, defenses=defenses({"name": "laplace", "scale": 0.2}))
    _, plain = both(model, 4)
    noise = (noisy - plain)[:20_000].numpy()
    oracle = laplace(scale=0.2).rvs((200_000, 4), random_state=0).mean(1)
    assert kstest(noise, oracle).pvalue > 1e-3
    assert kstest(noise, oracle * 1.5).pvalue < 1e-9
    assert kstest(noise, norm(scale=noise.std()).cdf).pvalue < 0.05, "a mean of four is not Gaussian yet"


def test_local_steps_are_taken_by_each_client(load):
    own, mean = both(load("bert"), 4, training=LocalTraining("sgd", 0.5, epochs=2))
    assert float((own - mean).norm()) < 1e-5 * float(own.norm())


def test_random_pruning_is_drawn_for_each_client(load):
    model = load("bert")
    _, pruned = both(model, 8, defenses=defenses({"name": "random-pruning", "rate": 0.5}))
    _, plain = both(model, 8)
    sent = plain.abs() > 1e-4 * plain.abs().max()
    # each of eight is zero by itself: all of them one time in 256
    assert float((pruned[sent] == 0).double().mean()) < 0.05
    assert float((pruned - plain).norm()) > 0.1 * float(plain.norm())


def test_two_rounds_of_one_stream_are_the_same(load):
    model = load("bert")
    batch = batch_of(model, sentences(LENGTHS, 1))
    client = Client(model, dropout=True, defenses=defenses({"name": "clip", "norm": 0.1}))
    one, other = (mean_update(client, batch, 8, stream(3, "round")).tensors for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
