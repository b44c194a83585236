"""Local steps replayed: the oracle is the client, who really trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradaudit.attacks.grab import Grab
from gradaudit.attacks.tag import Tag
from gradaudit.client.client import Client
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.matching.distances import L2, Cosine, SquaredL2
from gradaudit.leakage.matching.masks import Masks
from gradaudit.leakage.matching.objective import Objective
from gradaudit.leakage.matching.replay import Replay, objective_of
from gradaudit.models.local_steps import by_optimizer, by_rule, local_steps, optimizer_of
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining
from tiny_models import SETTINGS, batch_of, doubled, seen_of, sentences

FROZEN = ("embeddings",)


def scene(load, how: LocalTraining, family: str = "bert", task: str = "classification", selection: str = "all"):
    model = doubled(load(family, task))
    batch = batch_of(model, sentences((4, 5), 1), [1, 0])
    seen = seen_of(Client(model, how, freeze=FROZEN), batch, selection, Given(lengths=True, labels=True))
    labels = batch.ids if batch.labels is None else batch.labels
    return model, batch, seen, labels[None]


RULES = {
    "sgd": LocalTraining("sgd", 0.05),
    "momentum, decay": LocalTraining("sgd", 0.05, momentum=0.9, weight_decay=0.1),
    "adam": LocalTraining("adam", 1e-3, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
    "adamw": LocalTraining("adamw", 1e-3, weight_decay=0.1),
    "clipping, schedule": LocalTraining("adamw", 1e-3, clip_norm=0.5, schedule="linear"),
}


@pytest.mark.parametrize("how", RULES.values(), ids=RULES.keys())
def test_the_step_that_can_be_differentiated_is_torchs(how):
    rng = torch.Generator().manual_seed(0)
    start = {name: torch.randn(3, 4, generator=rng).double() for name in "ab"}
    gradients = [{name: 10.0**-n * torch.randn(3, 4, generator=rng).double() for name in "ab"} for n in range(4)]
    trained = {name: torch.nn.Parameter(p.clone()) for name, p in start.items()}
    torchs = by_optimizer(optimizer_of(how, trained.values()), how.rates(4), how.clip_norm)
    expected, found = (
        local_steps(local, [{n: g.clone() for n, g in one.items()} for one in gradients], lambda _, g, number: g, rule)
        for local, rule in ((trained, torchs), (start, by_rule(how, 4)))
    )
    for name, p in expected.items():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-12, atol=1e-14)


def test_a_step_of_entries_without_a_gradient_has_a_slope():
    """Adam divides by a root, whose slope at 0 is no number."""
    how = RULES["clipping, schedule"]
    gradient = torch.zeros(3, requires_grad=True)
    after = by_rule(how, 1)({"a": torch.ones(3)}, {"a": gradient})["a"]
    assert bool(torch.autograd.grad(after.sum(), gradient)[0].isfinite().all())


def test_the_truth_explains_a_weight_change_of_adamw(load):
    """As the Trainer steps, four minibatches of one sentence, two a step: in the client's order only."""
    how = LocalTraining(
        "adamw", 1e-3, minibatch=1, weight_decay=0.01, clip_norm=1.0, schedule="linear", eps=1e-3, accumulate=2
    )
    model = doubled(load("bert"))
    batch = batch_of(model, sentences((4, 5, 3, 4), 1), [1, 0, 1, 0])
    seen = seen_of(Client(model, how, freeze=FROZEN), batch, given=Given(lengths=True, labels=True))
    objective = objective_of(seen, SquaredL2(), 8)
    assert type(objective) is Replay
    vectors, labels = model.word_vectors()[batch.ids][None], batch.labels[None]
    with torch.no_grad():
        values = sorted(
            float(objective(vectors[:, order], batch.mask[order], labels[:, order])[0])
            for order in ([0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 1, 2], [2, 3, 0, 1], [1, 3, 0, 2], [1, 2, 0, 3])
        )
    assert values[0] < 1e-6 < 1e-3 < values[1]


@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_the_truth_explains_a_weight_change_of_several_steps(load, family, task):
    model, batch, seen, labels = scene(load, LocalTraining("sgd", 0.05, epochs=3), family, task)
    if task == "causal-lm":
        labels = torch.nn.functional.one_hot(labels, model.vocabulary_size).to(model.word_vectors())
    vectors = model.word_vectors()[batch.ids][None]
    with torch.no_grad():
        replayed = float(Replay(seen, SquaredL2())(vectors, batch.mask, labels)[0])
        as_one = float(Objective(seen, SquaredL2())(vectors, batch.mask, labels)[0])
    assert replayed < 1e-6  # the update is stored in float32
    assert as_one > 100 * replayed + 1e-4


def test_minibatches_are_taken_in_the_guess_s_order(load):
    """Of the orders of two sentences one is the client's: taken in that, the truth explains the change."""
    model, batch, seen, labels = scene(load, LocalTraining("sgd", 0.05, epochs=1, minibatch=1))
    vectors = model.word_vectors()[batch.ids][None]
    replay = Replay(seen, SquaredL2())
    with torch.no_grad():
        values = sorted(
            float(replay(vectors[:, order], batch.mask[order], labels[:, order])[0]) for order in ([0, 1], [1, 0])
        )
    assert values[0] < 1e-6 < 1e-4 < values[1]
    assert "order" in replay.notes()[0]


@pytest.mark.parametrize("distance", [L2(), Cosine()])
def test_one_step_replayed_is_the_gradient(load, distance):
    """Value and slope against the objective that reads factors."""
    # biases of keys have no gradient at all, and rounding has an angle
    model, batch, seen, labels = scene(load, LocalTraining("sgd", 0.05), selection="*:* head")
    noise = torch.randn((2, *batch.ids.shape, model.width), generator=torch.Generator().manual_seed(0))
    vectors = (model.word_vectors()[batch.ids] + 0.3 * noise).double().requires_grad_()
    found = []
    for objective in (Replay(seen, distance), Objective(seen, distance)):
        value = objective(vectors, batch.mask, labels.expand(2, 2))
        found.append((value.detach(), torch.autograd.grad(value.sum(), vectors)[0]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


def test_the_slope_of_three_steps_equals_finite_differences(load):
    model, batch, seen, labels = scene(load, LocalTraining("sgd", 0.1, epochs=3))
    rng = torch.Generator().manual_seed(0)
    at, direction = (torch.randn((1, *batch.ids.shape, model.width), generator=rng).double() for _ in range(2))
    at.requires_grad_()
    replay = Replay(seen, SquaredL2())
    slope = torch.autograd.grad(replay(at, batch.mask, labels).sum(), at)[0]
    with torch.no_grad():
        up, down = (float(replay(at + s * direction, batch.mask, labels)[0]) for s in (1e-6, -1e-6))
    assert float((slope * direction).sum()) == pytest.approx((up - down) / 2e-6, rel=1e-4)


@pytest.mark.parametrize("distance", [L2(), Cosine(), SquaredL2(0.01)])
def test_tensors_that_do_not_change_leave_the_slope_finite(load, distance):
    """In float32 the biases of keys stay to the last bit, and L2's slope at 0 is no number unless it is said."""
    model = load("bert")
    batch = batch_of(model, sentences((4,), 1), [1])
    seen = seen_of(Client(model, LocalTraining("sgd", 1e-4, epochs=2), freeze=FROZEN), batch)
    vectors = (model.word_vectors()[batch.ids] + 0.1)[None].requires_grad_()
    value = Replay(seen, distance)(vectors, batch.mask, batch.labels[None])
    slope = torch.autograd.grad(value.sum(), vectors)[0]
    assert bool(slope.isfinite().all())
    assert float(slope.abs().sum()) > 0


def test_what_is_replayed_and_what_is_not(load):
    _, _, seen, _ = scene(load, LocalTraining("sgd", 0.05, epochs=3))
    assert type(objective_of(seen, L2(), 8)) is Replay
    assert type(objective_of(seen, L2(), 2)) is Objective
    assert objective_of(seen, L2(), 0).notes() == ["a weight change of 3 local steps was read as one gradient"]
    for rate in (0.1, None):
        masked = replace(seen, knowledge=replace(seen.knowledge, dropout=rate))
        assert type(objective_of(masked, L2(), 8)) is Objective
    _, _, adaptive, _ = scene(load, LocalTraining("adamw", 0.05))
    masked = replace(adaptive, knowledge=replace(adaptive.knowledge, dropout=0.1))
    assert objective_of(masked, L2(), 8).notes() == ["dropout was on, or may have been, and was replayed as off"]
    with pytest.raises(NotSupportedError, match="as many as their replayed_steps"):
        objective_of(adaptive, L2(), 0)
    _, _, once, _ = scene(load, LocalTraining("sgd", 0.05))
    assert type(objective_of(once, L2(), 8)) is Objective
    assert objective_of(once, L2(), 8).notes() == []
    model, batch, seen, labels = scene(load, LocalTraining("sgd", 0.05, epochs=2))
    with pytest.raises(NotSupportedError, match="without dropout"):
        Replay(seen, L2())(
            model.word_vectors()[batch.ids][None], batch.mask, labels, Masks(2, torch.Generator().manual_seed(0))
        )


def test_replaying_reads_what_one_gradient_does_not(load):
    model = load("bert")
    batch = batch_of(model, sentences((3,), 3), [1])
    client = Client(model, LocalTraining("sgd", 0.05, epochs=3), freeze=FROZEN)
    seen = seen_of(client, batch, given=Given(labels=True, lengths=True))
    mine, found = set(model.content(batch.ids[0].tolist())), {}
    for steps in (8, 0):
        attack = Tag(steps=150, learning_rate=0.05, restarts=1, keep_best=True, replayed_steps=steps)
        found[steps] = attack(seen, stream(2, "attack"))
    read = {n: len(mine & set(model.content(one.sequences[0]))) for n, one in found.items()}
    assert found[8].details["replayed_steps"] == 3
    assert found[8].details["gradient_evaluations"] == 3 * found[0].details["gradient_evaluations"]
    assert found[8].notes == ()
    assert "read as one gradient" in found[0].notes[0]
    assert found[8].details["distance"] < 0.5 * found[0].details["distance"]
    assert read[8] > read[0]


def test_grab_searches_batches_whole_where_steps_are_replayed(load):
    _, batch, seen, _ = scene(load, LocalTraining("sgd", 0.05, epochs=2))
    found = Grab(rounds=1, steps=3, starts=9, permutations=3, passes=1)(seen, stream(0, "attack"))
    assert found.details["replayed_steps"] == 2
    assert [len(s) for s in found.sequences] == [len(s) for s in batch.sequences()]


@pytest.mark.parametrize("attack", [Grab(rounds=1, steps=2, starts=4, permutations=2, passes=1, refit=1), Tag(steps=2)])
def test_a_step_of_adamw_with_dropout_on_is_replayed_as_if_it_were_off(load, attack):
    model = load("bert")
    client = Client(model, LocalTraining("adamw", 1e-3), dropout=True)
    found = attack(seen_of(client, batch_of(model, sentences((4,), 1), [1])), stream(0, "attack"))
    assert found.details["replayed_steps"] == 1
    assert "dropout was on, or may have been, and was replayed as off" in found.notes
