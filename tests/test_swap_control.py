"""Impossibility: from nothing, from noise, or from another batch's update, no attack may beat chance."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, pstdev

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.errors import AuditError
from gradaudit.judge.text import TextJudge
from gradaudit.registry import build, known
from gradaudit.streams import stream
from gradaudit.types import Batch, Given, Observation, Reconstruction
from tiny_models import ENCODERS, MADE_UP, OTHERS, SETTINGS, batch_of, seen_of, sentences

TEXT = (name for name, cls in known("attack").items() if "classification" in cls.tasks)
ATTACKS = sorted(set(TEXT) - {"auto", "blind", "lti"})  # lti: tests/test_lti.py; auto: what it tries is here
GIVEN = Given(lengths=True, labels=True)
QUICK = {
    "dlg": {"steps": 15},
    "tag": {"steps": 15},
    "grab": {"steps": 6, "rounds": 2, "starts": 4, "permutations": 4, "passes": 1},
    "lamp": {"steps": 10, "starts": 4, "permutations": 4, "edits": 4, "every": 4},
    "dager": {"max_candidates": 500},
    "exchange": {"evaluations": 30, "proposals": 6},
}


def rouge1(model, batch: Batch, found: Reconstruction) -> float:
    value = TextJudge(model).judge(batch, found).scores["rouge1"]
    assert value is not None
    return value


def chance(model, batch: Batch, rounds: int) -> float:
    """Return the highest mean ROUGE-1 that so many uniformly drawn guesses of the right lengths would reach."""
    rng = torch.Generator().manual_seed(0)
    words = torch.tensor([t for t in range(model.vocabulary_size) if t not in model.special.ids])

    def draw() -> Reconstruction:
        sizes = [len(model.content(s)) for s in batch.sequences()]
        picks = [torch.randint(len(words), (n,), generator=rng) for n in sizes]
        return Reconstruction(tuple(tuple(words[pick].tolist()) for pick in picks))

    scores = [rouge1(model, batch, draw()) for _ in range(100)]
    return mean(scores) + 4 * pstdev(scores) / rounds**0.5


def attacked(name: str, seen: Observation, **fields) -> Reconstruction:
    """Return the attack's answer, an empty one where it refuses in a sentence."""
    try:
        return build("attack", name, QUICK.get(name, {}) | fields)(seen, stream(0, "attack"))
    except AuditError:
        return Reconstruction(())


def zeroed(seen: Observation) -> Observation:
    return replace(seen, tensors={n: torch.zeros_like(t) for n, t in seen.tensors.items()})


def noised(seen: Observation, seed: int) -> Observation:
    """Return Gaussian noise in place of every tensor, with its norm."""
    rng = torch.Generator().manual_seed(seed)
    noise = {n: torch.randn(t.shape, generator=rng) for n, t in seen.tensors.items()}
    return replace(seen, tensors={n: noise[n] * seen.tensors[n].norm() / noise[n].norm() for n in noise})


@pytest.mark.parametrize("what", ["zero", "noise"])
@pytest.mark.parametrize(("family", "task"), SETTINGS)
@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_and_noise_tell_nothing(load, name, family, task, what):
    # nothing is the same nothing whatever the batch
    model, scores, rounds = load(family, task), [], {"zero": 1, "noise": 4}[what]
    for seed in range(rounds):
        batch = batch_of(model, sentences((5,), seed))
        seen = seen_of(Client(model, dropout=name == "decode"), batch, given=GIVEN)
        empty = zeroed(seen) if what == "zero" else noised(seen, seed)
        scores.append(rouge1(model, batch, attacked(name, empty)))
    assert mean(scores) <= chance(model, batch, rounds)


@pytest.mark.parametrize("selection", ["all", "0-1:q", "0-1:q,k,v"])
@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_dager_on_noise_is_no_better_than_blind(load, family, task, selection):
    model = load(family, task)
    batch = batch_of(model, sentences((5, 4), 0))
    seen = noised(seen_of(Client(model), batch, selection, given=GIVEN), 1)
    blind = build("attack", "blind", {})(seen, stream(0, "blind"))
    found = attacked("dager", seen)
    assert rouge1(model, batch, found) <= rouge1(model, batch, blind) == 0.0
    if selection != "0-1:q":
        assert found.sequences == ()
        assert found.notes[0].startswith("not identifiable: ")


@pytest.mark.parametrize("sizes", [(5,), (4, 3)])
@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_swap_control_of_dager(load, family, task, sizes):
    """From batch A's update come A's words and none of B's, though the same client has just seen B."""
    model = load(family, task)
    client = Client(model)
    mine = batch_of(model, sentences(sizes, 1, MADE_UP))
    other = batch_of(model, sentences(sizes, 2, OTHERS))
    seen = seen_of(client, mine, given=GIVEN)
    seen_of(client, other, given=GIVEN)
    found = attacked("dager", seen)
    assert rouge1(model, mine, found) > 80
    assert rouge1(model, other, found) == 0.0


@pytest.mark.parametrize("sizes", [(5,), (3, 3)])
@pytest.mark.parametrize("family", ENCODERS)
def test_swap_control_of_decode(load, family, sizes):
    model = load(family)
    client = Client(model, dropout=True)
    mine, other = (batch_of(model, sentences(sizes, 1, words)) for words in (MADE_UP, OTHERS))
    seen = seen_of(client, mine)
    seen_of(client, other)
    found = attacked("decode", seen)
    assert rouge1(model, mine, found) > 40
    assert rouge1(model, other, found) == 0.0


@pytest.mark.parametrize(("name", "family", "task"), [("dlg", *SETTINGS[0]), *(("tag", *s) for s in SETTINGS)])
def test_swap_control_of_matching(load, name, family, task):
    """One block and many starts, so that few steps suffice to read A; B's score from the same answers is chance's."""
    model, rounds = load(family, task, layers=1), 3
    selection = "all" if task == "causal-lm" else "0:q,k,v"
    client, own, swapped = Client(model), [], []
    for seed in range(rounds):
        mine, other = (batch_of(model, sentences((3,), seed, words), [0]) for words in (MADE_UP, OTHERS))
        seen = seen_of(client, mine, selection, GIVEN)
        seen_of(client, other, selection, GIVEN)
        found = attacked(name, seen, steps=100, restarts=32, learning_rate=0.05, keep_best=True)
        own.append(rouge1(model, mine, found))
        swapped.append(rouge1(model, other, found))
    limit = chance(model, other, rounds)
    assert mean(own) > limit
    assert mean(swapped) <= limit
