"""Compiled steps: what they find is what the plain way finds, at any length, for any update of the same kind."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from gradaudit.attacks.tag import Tag
from gradaudit.client.client import Client
from gradaudit.leakage.matching import compiled
from gradaudit.leakage.matching.compiled import compiling
from gradaudit.leakage.matching.distances import L2, Cosine, OnSupport, SquaredL2
from gradaudit.leakage.matching.masks import Masks
from gradaudit.leakage.matching.objective import Objective
from gradaudit.streams import stream
from tiny_models import batch_of, seen_of, sentences

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")


def scene(load, length: int, seed: int):
    model = load("bert", layers=1)
    batch = batch_of(model, sentences((length,), seed), [1])
    seen = seen_of(Client(model, dropout=True), batch, "0:q head")
    return model, batch, Objective(seen, L2())


def slopes_of(model, batch, objective, asked: bool, shares: bool = True):
    masks = Masks(1, torch.Generator().manual_seed(1))
    noise = torch.randn((*batch.ids.shape, model.width), generator=torch.Generator().manual_seed(2))
    vectors = (model.word_vectors()[batch.ids] + 0.3 * noise)[None].requires_grad_()
    labels = torch.tensor([[[0.3, 0.7]]], requires_grad=True) if shares else torch.tensor([[1]])
    with torch.no_grad():
        objective(vectors, batch.mask, labels, masks)
    with compiling(asked):
        value = objective(vectors, batch.mask, labels, masks)
    wanted = [vectors, *([labels] if shares else []), *masks.variables()]
    return value.detach(), torch.autograd.grad(2 * value.sum(), wanted)


@needs_compiler
def test_a_compiled_step_is_the_plain_one_at_every_length_and_for_every_update(load):
    traced = 0
    for length, seed in ((4, 1), (6, 1), (4, 9)):
        model, batch, objective = scene(load, length, seed)
        value, slopes = slopes_of(model, batch, objective, True)
        assert objective.compiled == "yes"
        plain, wanted = slopes_of(model, batch, objective, False)
        torch.testing.assert_close(value, plain, rtol=1e-4, atol=1e-6)
        for found, right in zip(slopes, wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-5)
        traced = len(compiled._steps[model])
    assert traced == 1, "one trace serves all lengths and updates"


@pytest.mark.parametrize(
    ("family", "selection", "distance", "sizes", "candidates"),
    [
        ("bert", "*:* head", Cosine(), (4, 6), 2),
        ("bert", "all", Cosine(), (5,), 1),  # with key biases, whose gradient is rounding
        ("roberta", "all", L2(), (5, 3), 1),  # with a position table that has a padding row
        ("bert", "all", L2(), (5, 3), 1),
        ("gpt2", "*:q,k,v", SquaredL2(0.01), (4,), 3),
        # without an L1 term: signs of entries that are rounding on both sides (key biases) are chance
        ("mpnet", "all", OnSupport(L2(0.0)), (3, 6), 1),
    ],
)
def test_what_is_traced_is_the_plain_step(load, monkeypatch, family, selection, distance, sizes, candidates):
    """Without a compiler behind it: padding, several candidates, thirds of matrices, and another length than traced."""
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    monkeypatch.setattr(compiled, "_steps", type(compiled._steps)())
    model = load(family, layers=1) if family == "gpt2" else load(family)
    batch = batch_of(model, sentences(sizes, 1), [1, 0][: len(sizes)])
    objective = Objective(seen_of(Client(model), batch, selection), distance)
    noise = torch.randn((candidates, *batch.ids.shape, model.width), generator=torch.Generator().manual_seed(2))
    vectors = (model.word_vectors()[batch.ids] + 0.3 * noise).requires_grad_()
    labels = batch.labels.expand(candidates, -1)
    found = []
    for wanted in (True, False):
        with compiling(wanted):
            value = objective(vectors, batch.mask, labels)
        assert objective.compiled == ("yes" if wanted else "")
        weights = torch.arange(1.0, candidates + 1)
        found.append((value.detach(), torch.autograd.grad((weights * value).sum(), vectors)[0]))
    # slopes are sums that cancel: an entry is good to the rounding of the largest, by processor
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("late", [False, True])
def test_where_the_compiler_fails_the_plain_way_is_taken_and_told(load, monkeypatch, late):
    """At once, or when another length makes it compile anew."""

    def broken(graph: Any, **_: object) -> Any:
        def later(*inputs: Any) -> Any:
            if inputs[0].shape[2] != 11:
                raise RuntimeError("no compiler here\nand more")
            return graph(*inputs)

        if not late:
            raise RuntimeError("no compiler here\nand more")
        return later

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(compiled, "_steps", type(compiled._steps)())
    model = load("bert", layers=1)
    seen = seen_of(Client(model), batch_of(model, sentences((3,), 1), [1]), "0:q head")
    attack = Tag(steps=3)
    plain = attack(seen, stream(0, "attack"))
    with compiling():
        found = attack(seen, stream(0, "attack"))
    assert found.sequences == plain.sequences
    assert found.details["compiled"] == "RuntimeError: no compiler here"
    assert found.details["distance"] == plain.details["distance"]
    assert "compiled" not in plain.details


@pytest.mark.parametrize("right", ["nothing", "the value"])
def test_a_step_that_goes_astray_is_not_used(load, monkeypatch, right):
    """The check of a new length: a compiled step that finds another value, or the same with other slopes, is left."""
    model, batch, objective = scene(load, 4, 1)
    truth = slopes_of(model, batch, objective, False, shares=False)[0] if right == "the value" else torch.ones(1)

    def astray(*inputs: Any) -> Any:
        guess = inputs[: next(n for n, t in enumerate(inputs) if t.dtype == torch.bool)]
        return truth, *(torch.zeros_like(t, dtype=torch.float32) for t in guess)

    wrong = compiled._Step(astray)
    monkeypatch.setattr(compiled, "_steps", type(compiled._steps)())
    monkeypatch.setattr(compiled, "_made", lambda *_: wrong)
    value, _ = slopes_of(model, batch, objective, True, shares=False)
    assert objective.compiled == f"differs from the plain way at {batch.ids.shape[1]} tokens"
    assert wrong.lengths == {batch.ids.shape[1]: False}
    torch.testing.assert_close(value, slopes_of(model, batch, objective, False, shares=False)[0])
