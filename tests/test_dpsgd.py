"""DP-SGD: gradients an example against a loop, clipping and noise against what they say, and what is really sent."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

import gradaudit.client.examples
import gradaudit.client.text
from gradaudit.client.client import Client
from gradaudit.defenses.dpsgd import DPSGD
from gradaudit.defenses.noise import Gaussian
from gradaudit.errors import BadInputError
from gradaudit.models.spec import Lora, ModelSpec
from gradaudit.models.state import fingerprint_of
from gradaudit.models.zoo import load_model
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Batch, LocalTraining
from tiny_models import FAMILIES, NEWER_DECODERS, SETTINGS, batch_of, sentences

OPEN = DPSGD(clip=1e9, noise_multiplier=0.0)
"""Neither clips nor adds anything: the mean of the examples' gradients."""


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.double().flatten() for t in tensors.values()])


def rows_of(batch: Batch, *rows: int) -> Batch:
    at = list(rows)
    labels = None if batch.labels is None else batch.labels[at]
    return Batch(batch.ids[at], batch.mask[at], labels, tuple(batch.texts[r] for r in at))


def loop(model: Any, batch: Batch, **client: Any) -> list[Tensor]:
    """Each sentence's gradient by itself, through the undefended client: no hook, no batch."""
    return [
        flat(Client(model, **client).update(rows_of(batch, row), stream(0, "client")).tensors)
        for row in range(len(batch.ids))
    ]


def sent(model: Any, batch: Batch, defense: DPSGD, seed: int = 0, **client: Any) -> Tensor:
    return flat(Client(model, defenses=(defense,), **client).update(batch, stream(seed, "client")).tensors)


def close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= 1e-5 * float(other.norm())


@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_gradients_an_example_are_those_of_the_loop(load, family, task):
    model = load(family, task)
    batch = batch_of(model, sentences((4, 9, 6), 1))
    alone = loop(model, batch)
    assert close(sent(model, batch, OPEN), torch.stack(alone).mean(0))
    clip = float(torch.stack([g.norm() for g in alone]).median())
    clipped = [g * min(1.0, clip / float(g.norm())) for g in alone]
    assert close(sent(model, batch, DPSGD(clip, 0.0)), torch.stack(clipped).mean(0))


@pytest.mark.parametrize(("family", "task"), SETTINGS)
@pytest.mark.parametrize("clip", [1e-3, 0.5])
def test_no_example_sends_more_than_the_bound(load, family, task, clip):
    model = load(family, task)
    batch = batch_of(model, sentences((4, 9, 6), 1))
    for row, plain in enumerate(loop(model, batch)):
        norm = float(sent(model, rows_of(batch, row), DPSGD(clip, 0.0)).norm())
        assert norm <= clip * (1 + 1e-6)
        assert norm == pytest.approx(min(clip, float(plain.norm())), rel=1e-2)


def test_adapters_are_clipped_as_whole_models_are(folders):
    model = load_model(ModelSpec(f"random:{folders['llama']}", lora=Lora(4)))
    with torch.no_grad():
        for name, p in model.parameters().items():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(0))
    batch = batch_of(model, sentences((4, 6), 1))
    alone = loop(model, batch)
    clip = float(min(g.norm() for g in alone))
    clipped = [g * min(1.0, clip / float(g.norm())) for g in alone]
    assert close(sent(model, batch, DPSGD(clip, 0.0)), torch.stack(clipped).mean(0))


def test_frozen_parameters_are_not_sent_and_do_not_count_in_the_norm(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6), 1))
    freeze = ("embeddings", "0-1:q,k,v,o,f,p")
    alone = loop(model, batch, freeze=freeze)
    clip = float(min(g.norm() for g in alone)) / 2
    found = sent(model, batch, DPSGD(clip, 0.0), freeze=freeze)
    assert close(found, torch.stack([g * clip / g.norm() for g in alone]).mean(0))
    assert len(found) < len(sent(model, batch, DPSGD(clip, 0.0)))


@pytest.mark.parametrize(("clip", "sigma", "size"), [(1.0, 0.5, 1), (0.25, 2.0, 4)])
def test_noise_has_the_stated_size_in_what_is_sent(load, clip, sigma, size):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6, 5, 7)[:size], 1))
    noise = sent(model, batch, DPSGD(clip, sigma)) - sent(model, batch, DPSGD(clip, 0.0))
    expected = sigma * clip / size
    drawn = noise[:20_000].numpy()
    assert kstest(drawn, "norm", args=(0, expected)).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert kstest(drawn, "norm", args=(0, wrong * expected)).pvalue < 1e-9


def test_what_the_attacker_sees_is_the_defended_gradient(load):
    """The published scripts read the gradient before the optimizer has clipped it and added noise."""
    model = load("bert")
    batch = batch_of(model, sentences((4, 6), 1))
    plain, defended = flat(Client(model).update(batch, stream(0, "c")).tensors), sent(model, batch, DPSGD(1e-4, 1.0))
    assert float(plain.norm()) > 100 * 1e-4
    cosine = float(plain @ defended) / float(plain.norm() * defended.norm())
    assert abs(cosine) < 0.1
    assert float(defended.norm()) == pytest.approx(1e-4 / 2 * len(plain) ** 0.5, rel=0.05)


def test_the_same_seed_sends_the_same_and_another_seed_other_noise(load):
    model = load("gpt2")
    batch = batch_of(model, sentences((4, 6), 1))
    first = sent(model, batch, DPSGD())
    assert torch.equal(first, sent(model, batch, DPSGD()))
    assert not torch.equal(first, sent(model, batch, DPSGD(), seed=1))


def test_parts_of_a_batch_add_up_to_the_batch(load, monkeypatch):
    model = load("roberta")
    batch = batch_of(model, sentences((4, 9, 6, 5, 7), 1))
    whole = sent(model, batch, DPSGD(0.5, 0.1))
    one = sum(p.numel() * 4 for p in model.parameters().values())
    for at_once in (1, 2):
        monkeypatch.setattr(gradaudit.client.text, "BYTES_AT_ONCE", at_once * one)
        assert close(sent(model, batch, DPSGD(0.5, 0.1)), whole)


@pytest.mark.parametrize(
    ("family", "task"),
    [*((f, "classification") for f in (*FAMILIES, *NEWER_DECODERS)), *((f, "causal-lm") for f in ("gpt2", "llama"))],
)
@pytest.mark.parametrize("padding", ["right", "left"])
def test_gradients_by_factors_are_those_of_opacus_hooks_with_the_same_dropout(load, family, task, padding):
    model = load(family, task)
    batch = batch_of(model, sentences((4, 9, 6), 1), [0, 1, 1] if task == "classification" else None)
    examples = gradaudit.client.examples.examples_of(model, batch, padding)
    client = Client(model, dropout=True, dropout_rate=0.3)
    trained = [name for name in model.parameters() if "relative_attention_bias" not in name]
    rows = torch.arange(3)
    hooks, factors = examples.apart(trained), examples.apart_once(trained)
    assert hooks.chunks.__code__ is not factors.chunks.__code__
    (one,), (other,) = (list(how.chunks(rows, client._part_mode(5, 0))) for how in (hooks, factors))
    assert set(one) == set(other) == set(trained)
    for name, expected in one.items():
        assert torch.allclose(other[name], expected, atol=1e-5, rtol=1e-3), name
    (again,) = factors.chunks(rows, client._part_mode(6, 0))
    assert family in ("llama", *NEWER_DECODERS) or any(not torch.equal(again[name], other[name]) for name in trained)


def test_parts_of_a_batch_share_no_dropout_masks(load, monkeypatch):
    model = load("bert")
    twice = batch_of(model, sentences((6,), 1) * 2)
    monkeypatch.setattr(gradaudit.client.text, "BYTES_AT_ONCE", 1)
    together = sent(model, twice, OPEN, dropout=True, dropout_rate=0.3)
    first = sent(model, rows_of(twice, 0), OPEN, dropout=True, dropout_rate=0.3)
    assert not close(together, first), "the second part dropped what the first did"
    assert torch.equal(together, sent(model, twice, OPEN, dropout=True, dropout_rate=0.3))
    assert not close(first, sent(model, rows_of(twice, 0), OPEN))


def test_one_local_step_goes_along_the_defended_gradient(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6), 1))
    defense = DPSGD(0.5, 0.3)
    gradient = sent(model, batch, defense)
    change = sent(model, batch, defense, training=LocalTraining("sgd", 0.1))
    assert float((change + 0.1 * gradient).norm()) < 1e-4 * float(change.norm())


def test_later_steps_start_from_the_weights_of_the_earlier(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6), 1))
    training = LocalTraining("sgd", 0.5, epochs=3)
    plain = flat(Client(model, training).update(batch, stream(0, "client")).tensors)
    assert float((sent(model, batch, OPEN, training=training) - plain).norm()) < 1e-4 * float(plain.norm())


class _Seen(DPSGD):
    """Writes down how many examples each step had."""

    def on_examples(self, chunks: Any, parameters: Any, expected: float, rng: torch.Generator) -> dict[str, Tensor]:
        held = list(chunks)
        sizes.append((sum(len(next(iter(c.values()))) for c in held), expected))
        return super().on_examples(held, parameters, expected, rng)


sizes: list[tuple[int, float]] = []


def test_sampling_takes_each_example_by_chance(load):
    model = load("bert", layers=1)
    batch = batch_of(model, sentences((4,) * 10, 1))
    sizes.clear()
    training = LocalTraining("sgd", 0.1, epochs=60, minibatch=2)
    Client(model, training, defenses=(_Seen(1.0, 0.0),)).update(batch, stream(0, "client"))
    taken = torch.tensor([float(n) for n, _ in sizes])
    assert len(sizes) == 300
    assert all(expected == 2.0 for _, expected in sizes)
    assert float(taken.mean()) == pytest.approx(2.0, abs=4 * (1.6 / 300) ** 0.5)
    assert float(taken.var()) == pytest.approx(1.6, rel=0.4), "binomial: 10 examples at rate 0.2"
    assert 0.0 in taken.tolist(), "a step may have no example"
    sizes.clear()
    shuffled = _Seen(1.0, 0.0, poisson=False)
    Client(model, LocalTraining("sgd", 0.1, 1, 4), defenses=(shuffled,)).update(batch, stream(0, "client"))
    assert sizes == [(4, 4.0), (4, 4.0), (2, 2.0)]


def test_a_step_without_examples_sends_noise_alone(load):
    parameters = {"a": torch.zeros(40, 500)}
    found = DPSGD(2.0, 3.0).on_examples(iter(()), parameters, 4.0, stream(0, "x"))["a"]
    assert kstest(found.flatten().numpy(), "norm", args=(0, 2.0 * 3.0 / 4.0)).pvalue > 1e-3


def test_the_model_is_left_as_it_was(load):
    model = load("mpnet")
    batch = batch_of(model, sentences((4, 6), 1))
    changed, weights = model.remember(), fingerprint_of(model.parameters())
    sent(model, batch, DPSGD(), training=LocalTraining("sgd", 0.5, 2))
    assert not changed()
    assert fingerprint_of(model.parameters()) == weights
    assert not any(hasattr(p, "grad_sample") for p in model.parameters().values())


def test_it_composes_with_what_acts_on_the_update_and_is_recorded(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6), 1))
    update = Client(model, defenses=(DPSGD(0.5, 0.0), Gaussian(0.01))).update(batch, stream(0, "client"))
    assert update.defenses == (
        {"name": "dp-sgd", "clip": 0.5, "noise_multiplier": 0.0, "poisson": True},
        {"name": "gaussian", "sigma": 0.01, "relative": False},
    )
    added = flat(update.tensors) - sent(model, batch, DPSGD(0.5, 0.0))
    assert float(added.std()) == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("defenses", [(Gaussian(0.1), DPSGD()), (DPSGD(), DPSGD())])
def test_it_comes_first_and_once(load, defenses):
    with pytest.raises(BadInputError, match=r"dp-sgd.*once, and first"):
        Client(load("bert"), defenses=defenses)


@pytest.mark.parametrize(
    "values", [{"clip": 0.0}, {"clip": float("inf")}, {"noise_multiplier": -1.0}, {"noise_multiplier": float("nan")}]
)
def test_bounds_and_noise_that_are_none_are_refused(values):
    with pytest.raises(BadInputError, match=next(iter(values))):
        build("defense", "dp-sgd", values)


def test_the_extra_is_named_where_it_is_missing(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)
    monkeypatch.setitem(sys.modules, "opacus.optimizers", None)
    model = copy.deepcopy(load("bert"))
    with pytest.raises(BadInputError, match=r"gradaudit\[dp\]"):
        sent(model, batch_of(model, sentences((4,), 1)), DPSGD())


def test_every_local_step_has_noise_and_dropout_masks_of_its_own(load):
    """Noise that repeats in every step is taken out by whoever knows the rates."""
    model = load("bert", layers=1)
    batch = batch_of(model, sentences((4, 6), 1))
    still = DPSGD(clip=1e-9, noise_multiplier=1e9)  # noise of 1 on a gradient of nothing
    change = sent(model, batch, still, training=LocalTraining("sgd", 1e-6, epochs=16))
    # 16 steps of noise 1/2 at rate 1e-6: independent ones add up by the root
    assert float(change.std()) == pytest.approx(1e-6 * 0.5 * 16**0.5, rel=0.1)
    one = sent(model, batch, OPEN, training=LocalTraining("sgd", 1e-6, 1), dropout=True, dropout_rate=0.4)
    two = sent(model, batch, OPEN, training=LocalTraining("sgd", 1e-6, 2), dropout=True, dropout_rate=0.4)
    assert float((two - 2 * one).norm()) > 0.1 * float(two.norm())


def test_left_padding_that_moves_others_positions_is_refused(load):
    model = load("gpt2")
    with pytest.raises(BadInputError, match="bounds nobody's part"):
        Client(model, defenses=(DPSGD(),), padding="left")
    Client(load("llama"), defenses=(DPSGD(),), padding="left")
    Client(model, defenses=(Gaussian(0.1),), padding="left")


def test_a_batch_drawn_by_chance_is_divided_by_what_was_expected_in_local_steps_too(load):
    model = load("bert", layers=1)
    batch = batch_of(model, sentences((4, 6), 1))
    client = Client(model, LocalTraining("sgd", 0.1), defenses=(DPSGD(0.5, 0.0),))
    own, expected = (flat(client.update(batch, stream(0, "c"), e).tensors) for e in (None, 8.0))
    assert float((expected * 4 - own).norm()) < 1e-3 * float(own.norm())
