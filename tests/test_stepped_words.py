"""Words of adapters after several steps of Adam, of which no step is seen by itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.adapters import stepped_words as module
from gradaudit.leakage.adapters.sparse_words import dictionary
from gradaudit.leakage.adapters.stepped_words import stepped_words, times
from gradaudit.leakage.uneven import step_signals
from gradaudit.leakage.uneven.entries import Entries
from gradaudit.leakage.uneven.propagation import Propagation
from gradaudit.leakage.uneven.step_signals import SignalFit, StepSignals
from gradaudit.leakage.uneven.steps import AdamStep, AdamSteps
from gradaudit.leakage.uneven.summed import Summed, summed
from gradaudit.streams import stream
from gradaudit.types import LocalTraining
from test_sparse_words import adapted, held
from tiny_models import batch_of, seen_of, sentences


@pytest.fixture(scope="module")
def wide(folders, tmp_path_factory):
    """96 dimensions: with fewer a line's entries are too few for several steps' signals."""
    where = tmp_path_factory.mktemp("wide") / "llama"
    shutil.copytree(folders["llama"], where)
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(config | {"hidden_size": 96, "head_dim": 24}))
    return adapted(f"random:{where}", 4)


def update(model, batch, epochs: int, **how):
    """A change of several steps, of block 0."""
    training = LocalTraining(
        **{"optimizer": "adamw", "learning_rate": 1e-3, "epochs": epochs, "weight_decay": 0.01, "eps": 1e-6} | how
    )
    return seen_of(Client(model, training), batch, "0:q,k,v")


def test_a_search_that_stands_still_begins_again_and_the_better_one_counts(wide, monkeypatch):
    """The rounding of the weights is as far as noise falls: told to go on, the search stands still there."""
    batch = batch_of(wide, sentences([3, 3], 2))
    change = summed(update(wide, batch, 2), 0)
    begun, left = [], []

    def spoiled(belief):
        begun.append(belief.turns)
        belief.sent = belief.sent.flip(1)  # what comes after reads another change

    monkeypatch.setattr(module, "_CLEAR", 0.0)
    monkeypatch.setattr(Propagation, "loosen", spoiled)
    monkeypatch.setattr(module._Search, "_proven", lambda _, taken: left.append(float(taken.noise.median())))
    found = stepped_words(wide, change, 0.05, True)
    assert len(begun) == module._ANEW
    assert {word.token for word in found.words} == held(wide, batch)
    monkeypatch.setattr(module._Search, "_quieter", staticmethod(lambda one, other: other))
    before = left[-1]
    stepped_words(wide, change, 0.05, True)
    assert left[-1] > 2 * before


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8)], ids=str)
def test_the_steps_are_those_of_torch(steps, betas):
    draw = torch.Generator().manual_seed(steps)
    gradients = torch.randn(steps, 3, 4, dtype=torch.double, generator=draw) * 1e-7
    weights = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.double))
    optimizer = torch.optim.AdamW([weights], lr=1.0, betas=betas, eps=1e-8, weight_decay=0.0)
    for gradient in gradients:
        weights.grad = gradient.clone()
        optimizer.step()
    y, _ = AdamSteps([1.0] * steps, 1e-8, betas).taken(gradients)
    torch.testing.assert_close(y, -weights.detach(), rtol=1e-9, atol=1e-9)


def test_slopes_are_the_derivatives_and_one_step_is_adam_s_first():
    draw = torch.Generator().manual_seed(0)
    gradients = torch.randn(4, 3, 5, dtype=torch.double, generator=draw)
    step = AdamSteps([0.1, 0.2, 0.3, 0.4], 0.5)
    _, slopes = step.taken(gradients)
    every = torch.autograd.functional.jacobian(lambda g: step.taken(g)[0].sum(), gradients)
    torch.testing.assert_close(slopes, every)
    y, slopes = AdamSteps([1.0], 0.5).taken(gradients[:1])
    torch.testing.assert_close(y, AdamStep(0.5).sent(gradients[0]))
    torch.testing.assert_close(slopes[0], AdamStep(0.5).slope(gradients[0]))


@pytest.mark.parametrize("how", [{}, {"schedule": "linear"}, {"weight_decay": 0.0}, {"learning_rate": 1e-4}], ids=str)
@pytest.mark.parametrize("steps", [2, 5])
def test_the_sum_of_steps_is_known_to_the_rounding_of_weights(wide, how, steps):
    """Gradients made by hand, torch's optimizer in float32; with decay errors are bounds, as they may be alike."""
    training = LocalTraining(
        **{"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.01, "epochs": steps} | how
    )
    draw = torch.Generator().manual_seed(steps)
    seen = seen_of(Client(wide, training), batch_of(wide, sentences([4], 1)), "0:q,k,v")
    before = {name: wide.parameters()[name].detach() for name in seen.tensors}
    moved = {name: torch.nn.Parameter(value.clone()) for name, value in before.items()}
    gradients = {name: 1e-7 * torch.randn(steps, *value.shape, generator=draw) for name, value in before.items()}
    optimizer = torch.optim.AdamW(moved.values(), weight_decay=training.weight_decay)
    for at, rate in enumerate(training.rates(steps)):
        optimizer.param_groups[0]["lr"] = rate
        for name, value in moved.items():
            value.grad = gradients[name][at].clone()
        optimizer.step()
    sent = summed(replace(seen, tensors={name: moved[name].detach() - before[name] for name in before}), 0)
    assert sent is not None
    views = [view for role in "qkv" for view in wide.views(0, role)]
    every = torch.cat([torch.stack([view(g) for g in gradients[view.parameter]]) for view in views], 1)
    made, _ = sent.step.taken(every.double() / training.eps)
    chi2 = float(((made - sent.sent) / sent.spread).square().mean())
    assert (0.2 if training.weight_decay else 0.8) < chi2 < 1.2


def test_several_steps_give_the_words_and_what_is_certain_was_there(wide):
    named = right = 0
    for seed in range(3):
        batch = batch_of(wide, sentences([4], seed))
        found = Decode()(update(wide, batch, 2 + seed % 2), stream(0, "attack"))
        there, told = held(wide, batch), {word.token for word in found.words or ()}
        assert {word.token for word in found.words or () if word.certain} <= there
        named, right = named + len(told), right + len(told & there)
    assert right >= 9, "of 12"
    assert right >= 0.7 * named


@pytest.mark.parametrize("how", [{"minibatch": 1, "epochs": 1}, {"schedule": "linear"}, {"optimizer": "adam"}], ids=str)
def test_minibatches_a_falling_rate_and_adam_are_read_too(wide, how):
    decay = {"weight_decay": 0.0} if "optimizer" in how else {}
    right = 0
    for seed in (1, 2):  # of one of them another processor's rounding may leave the search standing
        batch = batch_of(wide, sentences([3, 3], seed))
        found = Decode()(update(wide, batch, **{"epochs": 2} | decay | how), stream(0, "attack"))
        right += len({word.token for word in found.words or ()} & held(wide, batch))
        assert {word.token for word in found.words or () if word.certain} <= held(wide, batch)
    assert right >= 4


def test_fresh_adapters_show_the_second_step(folders, wide):
    """B is zero, so that A has no gradient in the first step."""
    with torch.no_grad():
        model = adapted(wide.spec.name, 4, trained=False)
    batch = batch_of(model, sentences([4], 3))
    seen = update(model, batch, epochs=2)
    sent = summed(seen, 0)
    assert sent is not None
    assert sent.silent
    found = Decode()(seen, stream(0, "attack"))
    assert len({word.token for word in found.words or ()} & held(model, batch)) >= 3


@pytest.mark.parametrize("seed", range(3))
def test_a_change_that_no_words_made_gives_none_for_certain(wide, seed):
    sent = summed(update(wide, batch_of(wide, sentences([4], seed)), 2), 0)
    assert sent is not None
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.stack([line[torch.randperm(len(line), generator=draw)] for line in sent.sent])
    found = stepped_words(wide, replace(sent, sent=mixed), 0.05, True)
    assert not any(word.certain for word in found.words)
    assert len(found.words) <= 2


@pytest.mark.parametrize("at_once", [2**26, 2 * 16 * 200], ids=["together", "by two lines"])
def test_signals_of_known_rows_are_found_from_nothing_and_idle_rows_shrink(monkeypatch, at_once):
    monkeypatch.setattr(step_signals, "_AT_ONCE", at_once)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 200, dtype=torch.double, generator=draw)
    signals = 30 * torch.randn(2, 6, 8, dtype=torch.double, generator=draw)
    signals[:, :, 5:] = 0
    step = AdamSteps([0.5, 0.5], 1.0)
    sent, _ = step.taken(torch.einsum("knr,rd->knd", signals, rows))
    fit = SignalFit(sent, torch.full_like(sent, 1e-6), step, torch.eye(2).double())
    zero = torch.zeros_like(signals)
    start = StepSignals(
        zero,
        zero + 1,
        zero[:, 0] + 1,
        sent * 0,
        torch.ones(2, *sent.shape).double() / 2,
        sent[:, 0] * 0 + 1,
        sent[:, 0],
    )
    found = fit.settled(start, rows, 20, 5)
    near = found.left < 1e-6
    assert int(near.sum()) >= 2
    torch.testing.assert_close(found.signals[:, near], signals[:, near], rtol=1e-3, atol=1e-2)
    need = (found.signals.square() / found.spread).mean(1).amax(0)
    assert float(need[:5].min()) > 100 * float(need[5:].max())


def test_of_one_step_the_error_is_that_of_its_entries():
    draw = torch.Generator().manual_seed(0)
    gradient = 3 * torch.randn(4, 30, dtype=torch.double, generator=draw)
    spread = torch.full_like(gradient, 1e-7)
    groups, step = {"one": 1, "other": 3}, AdamSteps([1.0], 1.0)
    y, slopes = step.taken(gradient[None])
    made = Summed(y, spread, step, groups).error(gradient[None], slopes)
    torch.testing.assert_close(made, Entries(y, spread, AdamStep(1.0), groups).error(gradient))


@pytest.mark.parametrize("twin", [False, True])
def test_a_word_whose_row_another_one_has_is_not_certain(wide, twin):
    """Three words' signals of two steps, all else is the rounding that is reckoned with."""
    model = adapted(wide.spec.name, 2)
    ids = [token for token in range(model.vocabulary_size) if token not in model.special.ids]
    words, other = ids[:3], ids[3]
    if twin:
        with torch.no_grad():
            embedding = model.parameters()[model.group("word")[0]]
            embedding[other] = embedding[words[1]]
        model.weights_changed()
    rows = normalize(dictionary(model, 0)[0][words], dim=1) * model.width**0.5
    draw = torch.Generator().manual_seed(1)
    gradients = torch.einsum("knr,rd->knd", 20 * torch.randn(2, 8, 3, dtype=torch.double, generator=draw), rows)
    step = AdamSteps([0.5, 0.5], 1.0)
    sent = step.taken(gradients)[0] + 1e-5 * torch.randn(8, model.width, dtype=torch.double, generator=draw)
    spread = torch.full_like(sent, 1e-5)
    found = stepped_words(model, Summed(sent, spread, step, {"0.q": 8}), 0.05, True)
    sure = {word.token for word in found.words if word.certain}
    assert sure == ({words[0], words[2]} if twin else set(words))


@pytest.mark.parametrize("epochs", [2, 13])
def test_more_steps_than_a_line_can_tell_are_no_error(folders, epochs):
    model = adapted(f"random:{folders['llama']}", 2)
    batch = batch_of(model, sentences([3, 3, 3], 1))
    found = Decode()(update(model, batch, epochs, minibatch=1), stream(0, "attack"))
    assert not any(word.certain for word in found.words or ())


def test_a_claim_of_a_billion_steps_takes_no_memory(wide):
    seen = update(wide, batch_of(wide, sentences([4], 1)), 2)
    many = replace(seen.knowledge, training=replace(seen.knowledge.training, epochs=10**9))
    with pytest.raises(NotSupportedError, match="at most 64 steps"):
        Decode()(replace(seen, knowledge=many), stream(0, "attack"))


@pytest.mark.parametrize(("silent", "count"), [(False, 3), (True, 3)])
def test_signals_change_smoothly_over_steps_of_a_whole_batch(silent, count):
    base = times(10, True, silent, 3)
    assert base.shape == (count, 10)
    assert bool((base[:, 0] == 0).all()) == silent
    torch.testing.assert_close(base @ base.T, (10 - silent) * torch.eye(3, dtype=torch.double))
    two = [[1.0, 1, 0, 0], [0.0, 0, 1, 1]]
    assert times(4 + silent, False, silent, 2).tolist() == [[0.0] * silent + row for row in two]
    torch.testing.assert_close(times(4, False, False, 4), torch.eye(4, dtype=torch.double))
