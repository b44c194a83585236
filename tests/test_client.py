"""The client: updates against hand-written loops and torch's own optimizers, and a model left as it was."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import transformers

from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of
from gradaudit.defenses.base import UpdateDefense
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Batch, Given, LocalTraining
from tiny_models import FAMILIES, SETTINGS, batch_of, doubled, sentences


def update_of(client: Client, batch: Batch, seed: int = 0):
    return client.update(batch, stream(seed, "client"))


def own_loss(model, module, batch: Batch, rows=slice(None)) -> torch.Tensor:
    """Return transformers' own loss of some rows of a batch."""
    ids, mask = batch.ids[rows], batch.mask[rows]
    labels = batch.labels[rows] if batch.labels is not None else ids.masked_fill(~mask, -100)
    return module(input_ids=ids, attention_mask=mask.long(), labels=labels).loss


@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_gradient_is_autograds(load, family, task):
    model = load(family, task)
    batch = batch_of(model, sentences((4, 6), 1))
    module = copy.deepcopy(model.module)
    own_loss(model, module, batch).backward()
    found = update_of(Client(model), batch)
    assert found.kind == "gradient"
    assert set(found.tensors) == {n for n, _ in module.named_parameters()}
    for name, p in module.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(found.tensors[name], expected, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m)
        assert not found.tensors[name].requires_grad


@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_one_sgd_step_is_the_gradient_times_the_learning_rate(load, family, task):
    model, rate = load(family, task), 0.5
    batch = batch_of(model, sentences((4, 6), 1))
    gradient = update_of(Client(model), batch)
    change = update_of(Client(model, LocalTraining("sgd", rate)), batch)
    assert change.kind == "delta"
    for name, g in gradient.tensors.items():
        torch.testing.assert_close(change.tensors[name], -rate * g, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_sgd_steps_are_the_loop_written_by_hand(load, family):
    model, rate, epochs = load(family), 0.05, 3
    batch = batch_of(model, sentences((4, 6), 1))
    module = copy.deepcopy(model.module)
    for _ in range(epochs):
        module.zero_grad()
        own_loss(model, module, batch).backward()
        with torch.no_grad():
            for p in module.parameters():
                if p.grad is not None:
                    p -= rate * p.grad
    found = update_of(Client(model, LocalTraining("sgd", rate, epochs)), batch)
    for name, p in module.named_parameters():
        torch.testing.assert_close(found.tensors[name], (p - model.parameters()[name]).detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("family", FAMILIES)
def test_adamw_is_torchs_on_the_module_itself(load, family, decay):
    # in float64: Adam divides by the gradient's size, and a key's bias has a gradient of rounding alone
    model = doubled(load(family))
    batch = batch_of(model, sentences((4, 6), 1))
    module = copy.deepcopy(model.module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=decay)
    for _ in range(3):
        optimizer.zero_grad()
        own_loss(model, module, batch).backward()
        optimizer.step()
    found = update_of(Client(model, LocalTraining("adamw", 1e-3, 3, weight_decay=decay)), batch)
    for name, p in module.named_parameters():
        change = (p - model.parameters()[name]).detach()
        torch.testing.assert_close(found.tensors[name], change, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: n + m)


HOW = {
    "momentum": LocalTraining("sgd", 0.05, 3, momentum=0.9, weight_decay=0.1),
    "adam": LocalTraining("adam", 1e-3, 3, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6),
    "adamw": LocalTraining("adamw", 1e-3, 4, eps=1e-6, clip_norm=0.1, schedule="linear"),
    "clipped": LocalTraining("sgd", 0.5, 2, clip_norm=0.1, schedule="linear"),
}


@pytest.mark.parametrize("how", HOW)
def test_each_field_is_what_a_loop_of_torch_and_transformers_does(load, how):
    """The oracle is a stock loop: torch's optimizer, its clipping, and the Trainer's linear schedule."""
    told = HOW[how]
    model = doubled(load("bert"))
    batch = batch_of(model, sentences((4, 6), 1))
    module = copy.deepcopy(model.module)
    shared = {"lr": told.learning_rate, "weight_decay": told.weight_decay}
    if told.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), momentum=told.momentum, **shared)
    else:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[told.optimizer]
        optimizer = kind(module.parameters(), betas=told.betas, eps=told.eps, **shared)
    linear = transformers.get_linear_schedule_with_warmup(optimizer, 0, told.epochs)
    for _ in range(told.epochs):
        optimizer.zero_grad()
        own_loss(model, module, batch).backward()
        if told.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), told.clip_norm)
        optimizer.step()
        if told.schedule == "linear":
            linear.step()
    found = update_of(Client(model, told), batch)
    for name, p in module.named_parameters():
        change = (p - model.parameters()[name]).detach()
        torch.testing.assert_close(found.tensors[name], change, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: n + m)


def test_accumulated_minibatches_make_the_step_of_their_mean(load):
    model = doubled(load("bert"))
    batch = batch_of(model, sentences((4, 4, 4, 4), 1))
    whole = LocalTraining("sgd", 0.1, 2)
    parts = LocalTraining("sgd", 0.1, 2, minibatch=1, accumulate=4)
    assert (parts.steps(4), parts.rates(2)) == (2, (0.1, 0.1))
    one, other = (update_of(Client(model, how), batch).tensors for how in (whole, parts))
    for name, change in one.items():
        torch.testing.assert_close(other[name], change, rtol=1e-6, atol=1e-10)
    twins = batch_of(model, sentences((4,), 1) * 2)
    one, other = (
        update_of(Client(model, LocalTraining("sgd", 0.1, minibatch=1, accumulate=n), dropout=True), b).tensors
        for n, b in ((1, twins.take(torch.tensor([0]))), (2, twins))
    )
    assert not torch.allclose(one["classifier.weight"], other["classifier.weight"]), "each pass draws masks of its own"


@pytest.mark.parametrize(("precision", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_low_precision_is_autocast_on_the_module_itself(load, precision, kind):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6), 1))
    module = copy.deepcopy(model.module)
    with torch.autocast("cpu", kind):
        loss = own_loss(model, module, batch)
    scale = 1024 if kind == torch.float16 else 1
    (loss * scale).backward()
    found = update_of(Client(model, LocalTraining(precision=precision)), batch).tensors
    plain = update_of(Client(model), batch).tensors
    for name in ("bert.encoder.layer.0.attention.self.query.weight", "classifier.weight"):
        own = module.get_parameter(name).grad / scale
        torch.testing.assert_close(found[name], own, rtol=1e-3, atol=1e-6)
        assert kind == torch.float16 or torch.equal(found[name], found[name].to(kind).float())
        assert not torch.equal(found[name], plain[name])


@pytest.mark.parametrize("optimizer", ["none", "sgd", "adamw"])
def test_weights_in_bfloat16_are_trained_as_the_module_itself_is(folders, optimizer):
    model = load_model(ModelSpec(f"random:{folders['bert']}", weights="bfloat16"))
    batch = batch_of(model, sentences((4, 6), 1))
    module = copy.deepcopy(model.module).to(torch.bfloat16)
    assert all(torch.equal(p.float(), model.parameters()[name]) for name, p in module.named_parameters())
    own_loss(model, module, batch).backward()
    found = update_of(Client(model, LocalTraining(optimizer, 0.01, precision="bf16-weights")), batch).tensors
    if optimizer != "none":
        kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
        kind(module.parameters(), lr=0.01, weight_decay=0.0).step()
        sent = {name: p.float() - model.parameters()[name] for name, p in module.named_parameters()}
    else:
        sent = {name: p.grad.float() for name, p in module.named_parameters() if p.grad is not None}
    for name, value in sent.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-6, msg=lambda m, n=name: n + m)
    narrow = found if optimizer == "none" else {n: t + model.parameters()[n] for n, t in found.items()}
    assert all(torch.equal(t.bfloat16().float(), t) for t in narrow.values())


@pytest.mark.parametrize("guarded", [False, True], ids=["whole", "by example"])
def test_label_smoothing_is_torchs(load, guarded):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6), 1))
    module = copy.deepcopy(model.module)
    logits = module(input_ids=batch.ids, attention_mask=batch.mask.long()).logits
    torch.nn.functional.cross_entropy(logits, batch.labels, label_smoothing=0.2).backward()
    guard = build("defense", "dp-sgd", {"clip": 1e6, "noise_multiplier": 0.0})
    client = Client(model, LocalTraining(label_smoothing=0.2), defenses=(guard,) if guarded else ())
    found, plain = update_of(client, batch).tensors, update_of(Client(model), batch).tensors
    for name in ("bert.encoder.layer.0.attention.self.query.weight", "classifier.weight"):
        torch.testing.assert_close(found[name], module.get_parameter(name).grad, rtol=1e-4, atol=1e-8)
        assert not torch.allclose(found[name], plain[name], rtol=1e-2)


def test_next_words_have_no_labels_to_smooth(load):
    model = load("gpt2", "causal-lm")
    with pytest.raises(BadInputError, match="label_smoothing"):
        update_of(Client(model, LocalTraining(label_smoothing=0.2)), batch_of(model, sentences((4,), 1)))


def test_low_precision_and_examples_gradients_are_refused(load):
    guard = build("defense", "dp-sgd", {"clip": 1.0, "noise_multiplier": 1.0})
    with pytest.raises(NotSupportedError, match="precision"):
        Client(load("bert"), LocalTraining(precision="bf16"), defenses=(guard,))


def test_minibatches_are_each_sentence_once_an_epoch(load):
    """With a learning rate so small that weights stand still, an epoch of single sentences is the sum of gradients."""
    model, double = load("bert"), doubled(load("bert"))
    batch = batch_of(model, sentences((4, 6, 3), 1))
    training = LocalTraining("sgd", 1e-3, epochs=2, minibatch=1)
    assert training.steps(3) == 6
    found = update_of(Client(double, LocalTraining("sgd", 1e-9, 2, 1)), batch)
    singles = [Batch(batch.ids[i : i + 1], batch.mask[i : i + 1], batch.labels[i : i + 1], ()) for i in range(3)]
    gradients = [update_of(Client(double), one).tensors for one in singles]
    for name, change in found.tensors.items():
        total = 2 * sum(g[name] for g in gradients)
        torch.testing.assert_close(change, -1e-9 * total, rtol=1e-3, atol=1e-15)
    order = [update_of(Client(model, training), batch, seed).tensors["classifier.weight"] for seed in (0, 0, 1)]
    assert torch.equal(order[0], order[1])
    assert not torch.equal(order[0], order[2]), "the order is drawn from the client's stream"


def test_dropout_comes_from_the_clients_stream(load):
    for family in FAMILIES:
        model = load(family)
        batch = batch_of(model, sentences((4, 6), 1))
        rate = 0.0 if family == "llama" else 0.1
        on = [update_of(Client(model, dropout=True), batch, seed) for seed in (0, 0, 1)]
        off = [update_of(Client(model), batch, seed) for seed in (0, 1)]
        head = next(n for n in model.group("head") if n.endswith("weight"))
        assert all(torch.equal(on[0].tensors[n], on[1].tensors[n]) for n in on[0].tensors)
        assert all(torch.equal(off[0].tensors[n], off[1].tensors[n]) for n in off[0].tensors)
        assert torch.equal(on[0].tensors[head], on[2].tensors[head]) == (rate == 0.0)
        assert torch.equal(on[0].tensors[head], off[0].tensors[head]) == (rate == 0.0)
        assert (on[0].dropout, off[0].dropout) == (rate, 0.0)


def test_every_local_step_draws_its_own_mask(load):
    """At a learning rate of nearly nothing, two steps with one mask would be twice the first step."""
    model = doubled(load("bert"))
    batch = batch_of(model, sentences((4,), 1))
    for dropout in (False, True):
        one, two = (
            update_of(Client(model, LocalTraining("sgd", 1e-9, n), dropout), batch).tensors["classifier.weight"]
            for n in (1, 2)
        )
        assert bool((two - 2 * one).norm() > 0.1 * one.norm()) == dropout


@dataclass(frozen=True)
class Failing(UpdateDefense):
    """A defense that breaks down."""

    name: ClassVar[str] = "failing"

    def on_update(self, tensors, rng):
        raise RuntimeError("broke down")


@pytest.mark.parametrize("optimizer", ["none", "sgd", "adamw"])
@pytest.mark.parametrize("failing", [False, True])
def test_the_model_and_the_global_generator_stay_as_they_were(load, monkeypatch, optimizer, failing):
    for family in FAMILIES:
        model = load(family)
        before = {n: (p.clone(), p.requires_grad) for n, p in model.parameters().items()}
        state = torch.random.get_rng_state()
        batch = batch_of(model, sentences((4, 6), 1))
        client = Client(model, LocalTraining(optimizer, 0.1, 2), dropout=True)
        if failing:
            with pytest.raises(RuntimeError, match="broke down"):
                update_of(Client(model, client.training, True, defenses=(Failing(),)), batch)
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(type(model), "loss", lambda *args, **kwargs: 1 / 0)
                update_of(client, batch)
        else:
            update_of(client, batch)
        assert not model.module.training
        assert torch.equal(state, torch.random.get_rng_state())
        for name, p in model.parameters().items():
            assert torch.equal(p, before[name][0])
            assert p.requires_grad == before[name][1]
            assert p.grad is None


def test_frozen_parameters_are_absent_and_the_rest_is_the_same(load):
    model = load("bert")
    batch = batch_of(model, sentences((4,), 1))
    whole = update_of(Client(model), batch)
    for training in (LocalTraining(), LocalTraining("sgd", 0.1)):
        part = update_of(Client(model, training, freeze=("embeddings", "0-1:q,k")), batch)
        gone = {*model.group("embeddings"), *(v.parameter for n in (0, 1) for r in "qk" for v in model.views(n, r))}
        assert set(part.frozen) == gone
        assert set(part.tensors) == set(whole.tensors) - gone
        scale = -training.learning_rate if training.optimizer == "sgd" else 1.0
        for name, value in part.tensors.items():
            torch.testing.assert_close(value, scale * whole.tensors[name], rtol=1e-3, atol=1e-6)
    with pytest.raises(BadInputError, match="every parameter is frozen"):
        update_of(Client(model, freeze=("all",)), batch)


@pytest.mark.parametrize("freeze", [("0:q",), ("0:q,k",), ("0:q", "0:q", "0:q"), ("0:q", "0:k", "0:q")])
def test_a_fused_parameter_cannot_be_frozen_in_part(load, freeze):
    model = load("gpt2")
    with pytest.raises(BadInputError, match=r"'transformer.h.0.attn.c_attn.weight' holds more than the roles named"):
        Client(model, freeze=freeze).frozen()
    assert Client(model, freeze=("0:q,k,v",)).frozen() == ("transformer.h.0.attn.c_attn.weight",)
    assert Client(model, freeze=("0:q", "0:k,v")).frozen() == ("transformer.h.0.attn.c_attn.weight",)


def test_an_empty_batch_is_refused(load):
    model = load("bert")
    nothing = Batch(torch.zeros((0, 0), dtype=torch.long), torch.zeros((0, 0), dtype=torch.bool), None, ())
    with pytest.raises(BadInputError, match="the batch is empty"):
        update_of(Client(model), nothing)
    padding = Batch(torch.zeros((2, 3), dtype=torch.long), torch.zeros((2, 3), dtype=torch.bool), torch.zeros(2), ())
    with pytest.raises(BadInputError, match="the batch is empty"):
        update_of(Client(model), padding)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_text_without_a_next_token_sends_nothing_and_no_nan(load, family):
    """A text of one token has nothing to predict; its mean over no tokens (0 / 0) must not reach the update."""
    model = load(family, "causal-lm")
    alone, other = batch_of(model, ["river"]), batch_of(model, ["garden walks"])
    assert all(float(t.abs().max()) == 0.0 for t in update_of(Client(model), alone).tensors.values())
    both = batch_of(model, ["river", "garden walks"])
    found = update_of(Client(model, LocalTraining("sgd", 0.1, minibatch=1)), both)
    expected = update_of(Client(model, LocalTraining("sgd", 0.1)), other)
    for name, value in found.tensors.items():
        torch.testing.assert_close(value, expected.tensors[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_lone_token_beside_others_makes_no_nan_where_gradients_are_apart(load, family):
    pytest.importorskip("opacus")
    model = load(family, "causal-lm")
    both, other = batch_of(model, ["river", "garden walks"]), batch_of(model, ["garden walks"])
    found = Client(model).example_gradients(both, stream(0, "x"))
    alone = update_of(Client(model), other).tensors
    for name, value in found.items():
        assert float(value[0].abs().max()) == 0.0
        torch.testing.assert_close(value[1], alone[name], rtol=1e-4, atol=1e-6)
    guarded = Client(model, defenses=(build("defense", "dp-sgd", {"noise_multiplier": 0.0}),))
    assert all(bool(t.isfinite().all()) for t in update_of(guarded, both).tensors.values())


def test_knowledge_is_what_is_given_and_nothing_else(load):
    model = load("bert")
    client, batch = Client(model, dropout=True), batch_of(model, sentences((4, 6), 1))
    update = update_of(client, batch)
    names = ("batch_size", "lengths", "labels", "training", "dropout", "defenses", "longest")
    nothing = dict.fromkeys(names, False)
    values = (2, (6, 8), (0, 1), LocalTraining(), 0.1, (), 8)
    assert knowledge_of(batch, update, Given(**nothing)).given() == {}
    for name, value in zip(names, values, strict=True):
        known = knowledge_of(batch, update, Given(**nothing | {name: True}))
        assert getattr(known, name) == value
        assert set(known.given()) == {name}
    assert set(knowledge_of(batch, update, Given()).given()) == {"batch_size", "training", "dropout", "defenses"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sentence_without_a_token_is_refused(load, family):
    model = load(family)
    batch = batch_of(model, sentences((3, 4), 0))
    hollow = dataclasses.replace(batch, mask=batch.mask & torch.tensor([[True], [False]]))
    with pytest.raises(BadInputError, match="no token"):
        update_of(Client(model), hollow)


def test_a_set_dropout_rate_is_recorded_told_and_put_back(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6), 1))
    rates = [m.p for m in model.module.modules() if isinstance(m, torch.nn.Dropout)]
    before = update_of(Client(model, dropout=True), batch)
    client = Client(model, dropout=True, dropout_rate=0.37)
    made = update_of(client, batch)
    assert made.dropout == 0.37
    assert knowledge_of(batch, made, Given()).dropout == 0.37
    assert update_of(Client(model), batch).dropout == 0.0
    assert [m.p for m in model.module.modules() if isinstance(m, torch.nn.Dropout)] == rates
    again = update_of(Client(model, dropout=True), batch)
    assert all(torch.equal(before.tensors[n], again.tensors[n]) for n in before.tensors)
    assert any(not torch.equal(before.tensors[n], made.tensors[n]) for n in before.tensors)


def test_a_training_that_diverges_is_one_clear_sentence(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6), 1))
    with pytest.raises(BadInputError, match="NaN or infinite values: the training diverged"):
        update_of(Client(model, LocalTraining("sgd", 1e30, 3)), batch)
