"""Simulated updates are the client's own: many in one pass, each as it would have been alone."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from gradaudit.client.client import Client
from gradaudit.client.simulate_text import ClientSimulation, _batch
from gradaudit.learned.public import Public
from gradaudit.learned.text.features import Hashed, hashed, noised, sizes_of
from gradaudit.learned.text.hashing import Hash
from gradaudit.registry import build, known
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import LocalTraining
from tiny_models import SETTINGS, batch_of, sentences

UPDATES, SIZE = 3, 2
FIELDS = {"gaussian": {"sigma": 0.01}, "laplace": {"scale": 0.01}, "topk": {"keep": 0.05}}
EXACT = ("sign", "topk", "quantize", "clip", "freeze", "error-feedback")
ALONE = ("dp-sgd", "dropout")
"""Replayed one by one."""


def public(model, count: int = UPDATES * SIZE) -> Public:
    batch = batch_of(model, sentences([3 + n % 3 for n in range(count)], 1))
    return Public(batch.ids, batch.mask, batch.labels, "made up")


def groups(texts: Public) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    shape = (-1, SIZE, texts.ids.shape[1])
    return texts.ids.view(shape), texts.mask.view(shape), None if texts.labels is None else texts.labels.view(-1, SIZE)


def simulated(simulation: ClientSimulation, texts: Public, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return all simulated tensors by name, noise that is still to come put in."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in simulation.shapes}
    rng = stream(seed, "noise to come")
    for _, parts in simulation(*groups(texts), stream(seed, "simulation")):
        for part in parts:
            value = part.values
            if part.noise is not None:
                noise = torch.randn(value.shape, generator=rng)
                value = value + noise * part.noise.view(-1, *[1] * (value.dim() - 1))
            found[part.name].append(value)
    return {name: torch.cat(values) for name, values in found.items()}


def alone(simulation: ClientSimulation, texts: Public, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the same from the client, one update after the other."""
    ids, mask, labels = groups(texts)
    out: dict[str, list[torch.Tensor]] = {name: [] for name in simulation.shapes}
    for n in range(len(ids)):
        batch = _batch(ids[n], mask[n], None if labels is None else labels[n])
        update = simulation.client.update(batch, stream(seed, "client", n))
        for name, value in simulation.selection.take(simulation.client.model, update.tensors)[0].items():
            out[name].append(value)
    return {name: torch.stack(values) for name, values in out.items()}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    largest = max(float(v.abs().max()) for v in expected.values())
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=5e-6 * largest), name


@pytest.mark.parametrize("selection", ["all", "0-1:q,f head"])
@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_it_equals_the_client_on_every_family(load, family, task, selection):
    model = load(family, task)
    simulation = ClientSimulation(Client(model), Selection(selection))
    assert simulation.at_once == (family != "mpnet"), "MPNet's position bias has no factors"
    assert not simulation.random
    assert_near(simulated(simulation, public(model)), alone(simulation, public(model)))


def test_every_defense_is_tried_here():
    assert set(EXACT) <= set(known("defense"))


@pytest.mark.parametrize("name", sorted(set(known("defense")) - set(ALONE)))
def test_it_equals_the_client_behind_every_defense(load, name):
    """Exactly where nothing is drawn; else the difference from the undefended update has the client's law."""
    model = load("bert")
    defense = build("defense", name, FIELDS.get(name, {}))
    # feedback needs what it feeds; an attacker simulates the first round
    behind = (build("defense", "topk", {"keep": 0.3}),) if name == "error-feedback" else ()
    simulation = ClientSimulation(Client(model, defenses=(defense, *behind)), Selection("all"))
    assert simulation.at_once
    texts = public(model)
    found, expected = simulated(simulation, texts), alone(simulation, texts)
    if name in EXACT:
        assert not simulation.random
        same = torch.cat([(found[n] - v).abs().flatten() < 1e-5 for n, v in expected.items()])
        assert float(same.float().mean()) > 0.995, "a sign or the last coordinate kept may fall to rounding"
        return
    if name == "token-obfuscation":  # the nearest stand-in is the only one that a vocabulary this small offers
        assert_near(found, expected)
        return
    assert set(found) == set(expected)
    plain = alone(ClientSimulation(Client(model), Selection("all")), texts)
    for key in ("bert.encoder.layer.0.intermediate.dense.weight", "bert.embeddings.position_embeddings.weight"):
        mine, theirs = (side[key] - plain[key] for side in (found, expected))
        # rounded, so that what is zero on one side and rounding on the other is one value
        sides = [(side * 1e4).round().flatten().numpy() for side in (mine, theirs)]
        assert stats.ks_2samp(*sides).pvalue > 1e-4, key
    again = simulated(simulation, texts, seed=1)
    assert any(not torch.equal(again[n], v) for n, v in found.items()), "fresh noise"


@pytest.mark.parametrize(
    "how",
    [
        {"training": LocalTraining("sgd", 0.1, 2)},
        {"dropout": True},
        {"clients": 2},
        *({"defenses": ({"name": name},)} for name in ALONE),
    ],
    ids=["local steps", "dropout", "clients", *ALONE],
)
def test_other_clients_are_replayed_one_by_one(load, how):
    model = load("bert")
    if "defenses" in how:
        pytest.importorskip("opacus")
        how = {"defenses": tuple(build("defense", d["name"], {}) for d in how["defenses"])}
    simulation = ClientSimulation(Client(model, **how), Selection("0:q"))
    texts = public(model)
    assert not simulation.at_once
    found = simulated(simulation, texts)
    assert {n: tuple(v.shape) for n, v in found.items()} == {n: (UPDATES, *s) for n, s in simulation.shapes.items()}
    if how.get("training") or how.get("clients"):
        assert not simulation.random
        assert_near(found, alone(simulation, texts))
    else:
        assert simulation.random
        assert any(not torch.equal(simulated(simulation, texts, 1)[n], v) for n, v in found.items())


def test_noise_behind_what_looks_at_the_whole_update_is_drawn_anew(load):
    model = load("bert")
    for tables, drawn in (
        ((("gaussian", {}),), False),
        ((("clip", {}),), False),
        ((("clip", {}), ("gaussian", {})), True),
        ((("topk", {"whole": True}), ("gaussian", {})), True),
        ((("topk", {}), ("gaussian", {})), False),
    ):
        client = Client(model, defenses=tuple(build("defense", *t) for t in tables))
        simulation = ClientSimulation(client, Selection("all"))
        assert simulation.random == drawn
        texts = public(model)
        again = [
            torch.cat(
                [part.values.flatten() for _, parts in simulation(*groups(texts), stream(n, "x")) for part in parts]
            )
            for n in range(2)
        ]
        assert torch.equal(*again) != drawn, "what is kept between epochs must not hold noise"


def test_hashed_noise_has_the_law_of_the_noise_hashed(load):
    model = load("gpt2", "causal-lm")
    noise = (build("defense", "gaussian", {"sigma": 0.5}),)
    simulation = ClientSimulation(Client(model, freeze=("word",), defenses=noise), Selection("all"))
    assert not simulation.random, "what comes before the noise may be kept"
    hash_ = Hash(sizes_of(simulation.shapes), 60, 5)
    texts = public(model)
    found = hashed(simulation, hash_, texts, SIZE, stream(0, "simulation"))
    clean = hashed(
        ClientSimulation(Client(model, freeze=("word",)), Selection("all")), hash_, texts, SIZE, stream(0, "simulation")
    )
    assert torch.allclose(found.values, clean.values)
    draws = torch.cat([noised(found, hash_, stream(n, "noise")) - found.values for n in range(60)])
    whole = torch.cat([hash_(simulated_noise(simulation, 0.5, n), UPDATES) for n in range(60)])
    sigmas = 0.5 * hash_.counts(hash_.sizes).sum(0).sqrt()
    for side in (draws / sigmas, whole / sigmas):
        assert stats.kstest(side.flatten().numpy(), "norm").pvalue > 1e-4
        assert stats.kstest(1.5 * side.flatten().numpy(), "norm").pvalue < 1e-6, "another sigma is told apart"
    assert noised(Hashed(found.values, None), hash_, stream(0, "noise")) is found.values


def simulated_noise(simulation: ClientSimulation, sigma: float, seed: int) -> list[tuple[str, torch.Tensor]]:
    rng = stream(seed, "whole noise")
    return [(n, sigma * torch.randn((UPDATES, *s), generator=rng)) for n, s in simulation.shapes.items()]
