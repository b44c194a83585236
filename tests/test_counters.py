"""Matching under defenses it was told of: what it measures then is the published counter, and the truth explains it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.defense_traits import traits_of
from gradaudit.errors import NotSupportedError
from gradaudit.judge.diagnosis import diagnose
from gradaudit.judge.flags import flags, notes_of
from gradaudit.judge.text import TextJudge
from gradaudit.leakage.matching.counters import TEXT_COUNTERED, countered
from gradaudit.leakage.matching.distances import Cosine, Normalized, OnSupport, SquaredL2, WrongSigns
from gradaudit.leakage.matching.objective import Objective
from gradaudit.registry import build, known
from gradaudit.streams import stream
from gradaudit.types import Given, Reconstruction
from tiny_models import SETTINGS, batch_of, seen_of, sentences

KNOWN = Given(lengths=True, labels=True)
FIELDS = {"normalized-gaussian": {"sigma": 1e-9}, "random-pruning": {"rate": 0.6}, "topk": {"keep": 0.3}, "sign": {}}
KINDS = {"normalized-gaussian": Normalized, "random-pruning": OnSupport, "topk": OnSupport, "sign": WrongSigns}


def defended(model, name: str, words: int = 4):
    batch = batch_of(model, sentences((words,), 1), [1])
    return batch, seen_of(Client(model, defenses=(build("defense", name, FIELDS.get(name, {})),)), batch, given=KNOWN)


def truth(model, batch) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch.labels
    if labels is None:
        labels = torch.nn.functional.one_hot(batch.ids, model.vocabulary_size).to(model.word_vectors())
    return model.word_vectors()[batch.ids][None], labels[None]


@pytest.mark.parametrize(("family", "task"), SETTINGS)
@pytest.mark.parametrize("name", KINDS)
def test_the_truth_explains_a_defended_update_and_another_text_does_not(load, family, task, name):
    model = load(family, task)
    batch, seen = defended(model, name)
    distance = countered(SquaredL2(0.01), seen, "tag")
    assert type(distance) is KINDS[name]
    objective = Objective(seen, distance)
    vectors, labels = truth(model, batch)
    with torch.no_grad():
        right = float(objective(vectors, batch.mask, labels)[0])
        other = float(objective(vectors.roll(1, 2), batch.mask, labels)[0])
    assert right < 1e-3 * other


@pytest.mark.parametrize(("family", "task"), SETTINGS)
@pytest.mark.parametrize("l1", [0.0, 0.01])
def test_the_hinge_through_factors_equals_autograd(load, family, task, l1):
    """Value and slope by word vectors, against whole gradients written out with torch's own relu."""
    model = load(family, task)
    batch, seen = defended(model, "sign")
    objective = Objective(seen, WrongSigns(l1))
    rng = torch.Generator().manual_seed(0)
    vectors, labels = truth(model, batch)
    guess = torch.randn((2, *vectors.shape[1:]), generator=rng).requires_grad_()
    value = objective(guess, batch.mask, labels.expand(2, *labels.shape[1:]))
    (slope,) = torch.autograd.grad(value.sum(), guess)
    for n in range(2):
        one = guess[n].detach().clone().requires_grad_()
        loss = model.loss(embeddings=one, mask=batch.mask, labels=labels[0])
        names = [v.parameter for k, v in seen.views.items() if k not in objective.left_out]
        grads = torch.autograd.grad(
            loss, [model.parameters()[k] for k in names], create_graph=True, allow_unused=True, materialize_grads=True
        )
        wrong = [torch.relu(-g * seen.tensors[k]) for g, k in zip(grads, names, strict=True)]
        expected = torch.stack([w.square().sum() + l1 * w.sum() for w in wrong]).sum()
        torch.testing.assert_close(value[n].detach(), expected.detach(), rtol=1e-3, atol=1e-5)
        (wanted,) = torch.autograd.grad(expected, one)
        torch.testing.assert_close(slope[n], wanted, rtol=1e-2, atol=2e-3 * float(wanted.abs().max()))


def test_a_gradient_of_zeros_is_no_wrong_sign():
    observed = torch.tensor([[1.0, -1.0, 0.0, 1.0]])
    made = torch.tensor([[[0.0, 0.0, 5.0, 2.0]], [[-3.0, 1.0, 0.0, 0.0]]])
    value, slope = WrongSigns(0.5).each(made.clone(), observed, True)
    assert value.tolist() == [0.0, 9.0 + 1.0 + 0.5 * 4.0]
    assert slope is not None
    assert slope.tolist() == [[[0.0, 0.0, 0.0, 0.0]], [[-6.5, 2.5, 0.0, 0.0]]]


@pytest.mark.parametrize("attack", ["tag", "dlg", "lamp"])
def test_attacks_take_the_counter_when_told_and_say_so(load, attack):
    model = load("bert")
    cls = known("attack")[attack]
    assert cls.handles >= TEXT_COUNTERED
    assert {trait for name in KINDS for trait in traits_of(name)} == TEXT_COUNTERED
    quick = {"steps": 12, "learning_rate": 0.05} | (
        {"starts": 4, "permutations": 0, "edits": 0} if attack == "lamp" else {}
    )
    for name in KINDS:
        batch, seen = defended(model, name)
        on, off = (build("attack", attack, quick | {"counter": c}) for c in (True, False))
        untold = replace(seen, knowledge=replace(seen.knowledge, defenses=None))
        results = [a(s, stream(0, "attack")).details["distance"] for a, s in ((on, seen), (off, seen), (on, untold))]
        assert results[0] != results[1]
        if name == "normalized-gaussian":
            assert results[1] == results[2]
        raised = [_flags(model, batch, s, a) for a, s in ((on, seen), (off, seen), (on, untold))]
        assert ["defense-not-modeled" in r for r in raised] == [False, True, True]


@pytest.mark.parametrize(("attack", "defense", "flagged"), [
    ("tag", "topk", True), ("tag", "sign", True), ("tag", "gaussian", False), ("lti", "topk", False),
    ("decode", "clip", True), ("dager", "clip", True), ("blind", "sign", False)])  # fmt: skip
def test_a_defense_of_each_of_several_clients_is_another_one_of_their_mean(load, attack, defense, flagged):
    model = load("bert")
    batch, seen = defended(model, defense)
    built = build("attack", attack, {})
    assert "defense-not-modeled" not in _flags(model, batch, seen, built)
    assert ("defense-not-modeled" in _flags(model, batch, seen, built, clients=4)) == flagged


def test_the_best_of_many_guesses_is_flagged_and_those_that_were_matched_are_diagnosed(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 5), 1))
    seen = seen_of(Client(model), batch)
    right = tuple(tuple(s) for s in batch.sequences())
    wrong = tuple(tuple(s) for s in batch_of(model, sentences((4, 5, 6), 7)).sequences())
    many = Reconstruction((*wrong, *right), labels=(0, 1, 0, *batch.labels.tolist()))
    judge, client = TextJudge(model), Client(model)
    found, wanted = (
        diagnose(client, batch, judge.guessed(batch, one), seen, True) for one in (many, Reconstruction(right))
    )
    assert found == wanted
    assert "5 guesses for a batch of 2" in notes_of(many, 2)[0]
    assert not notes_of(many, 5)
    blind = build("attack", "blind", {})
    assert "surplus-guesses" in _flags(model, batch, seen, blind, found=many)
    assert "surplus-guesses" not in _flags(model, batch, seen, blind, found=Reconstruction(right))


def _flags(model, batch, seen, attack, clients: int = 1, found: Reconstruction | None = None) -> tuple[str, ...]:
    made = {"dropout": 0.0, "defenses": seen.knowledge.defenses or ({"name": "sign"},), "steps": 1, "replayed": False}
    made["clients"] = clients
    zero = {"rougeL": 1.0}
    own, surplus = TextJudge(model).flags(batch, seen, None), found is not None and found.count > len(batch)
    return flags(own=own, seen=seen, made=made, attack=attack, surplus=surplus, scores=zero, baseline=zero,
                 diagnosis=None)  # fmt: skip


def test_parts_of_a_matrix_cannot_be_normalized(load):
    model = load("gpt2")
    client = Client(model, defenses=(build("defense", "normalized-gaussian", {}),))
    seen = seen_of(client, batch_of(model, sentences((4,), 1)), selection="0:q")
    with pytest.raises(NotSupportedError, match="attack 'lamp' cannot normalize a part"):
        countered(Cosine(), seen, "lamp")
