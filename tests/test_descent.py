"""Continuous search: against torch's own optimizers on a loss of one's own, and the minimum of a quadratic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradaudit.attacks.dlg import Dlg
from gradaudit.client.client import Client
from gradaudit.leakage.matching import loop as harness
from gradaudit.leakage.matching.descent import Descent, Point, Schedule, better, by_lbfgs, minimize
from gradaudit.leakage.matching.distances import L2
from gradaudit.leakage.matching.masks import Masks
from gradaudit.leakage.matching.objective import Objective
from gradaudit.streams import stream
from gradaudit.types import Given
from tiny_models import batch_of, seen_of, sentences

TARGET = torch.randn((1, 1, 3, 4), generator=torch.Generator().manual_seed(7))
NO_LABELS = torch.zeros(1, 1, dtype=torch.long)


def far(vectors: Tensor, labels: Tensor) -> Tensor:
    """Return a loss that is no quadratic, so that a clipped slope goes another way."""
    away = vectors - TARGET
    return away.square().sum((1, 2, 3)) + away[:, :, 1].abs().pow(3).sum((1, 2))


@pytest.mark.parametrize(
    "how",
    [
        Schedule(7, 0.1),
        Schedule(7, 0.1, decay=0.5, decay_every=2),
        Schedule(7, 0.1, linear_to=10),
        Schedule(7, 0.1, weight_decay=0.3),
        Schedule(7, 0.1, clip=0.01, weight_decay=0.3, linear_to=7),
        Schedule(7, 0.1, clip=0.5),
    ],
)
def test_a_descent_is_torch_s_adam_at_the_rates_it_says(how):
    start = torch.zeros(1, 1, 3, 4)
    still = torch.tensor([[True, False, False]])
    descent = Descent(start, still, NO_LABELS, None, how)
    free = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([free], lr=0.1, weight_decay=how.weight_decay)
    for step in range(how.steps):
        descent.step(far)
        optimizer.zero_grad()
        far(torch.where(still[..., None], start, free), NO_LABELS).sum().backward()
        if how.clip:
            torch.nn.utils.clip_grad_norm_([free], how.clip)
        factor = max(0.0, 1 - step / how.linear_to) if how.linear_to else how.decay ** (step // how.decay_every)
        optimizer.param_groups[0]["lr"] = 0.1 * factor
        optimizer.step()
    torch.testing.assert_close(descent.vectors, torch.where(still[..., None], start, free).detach())
    assert torch.equal(descent.vectors[:, :, 0], start[:, :, 0])


def test_lbfgs_ends_at_the_minimum_of_a_quadratic_and_leaves_what_is_still():
    starts = torch.randn((2, 1, 3, 4), generator=torch.Generator().manual_seed(1))
    still = torch.tensor([[True, False, False]])
    scale = torch.tensor([1.0, 10.0, 100.0, 0.1])
    found = by_lbfgs(
        starts, still, NO_LABELS.expand(2, 1, 1)[:, 0], False,
        lambda v, y: ((v - TARGET).square() * scale).sum((1, 2, 3)), 30, what="test",
    )  # fmt: skip
    torch.testing.assert_close(found.embeddings[:, :, 1:], TARGET[:, :, 1:].expand(2, -1, -1, -1), rtol=1e-2, atol=1e-2)
    assert torch.equal(found.embeddings[:, :, 0], starts[:, :, 0])
    assert 2 < found.evaluations < 2 * 30 * 20


def test_lbfgs_learns_labels_beside_the_vectors():
    wanted = torch.tensor([[0.2, 0.3, 0.5]])
    found = by_lbfgs(
        torch.zeros(1, 1, 3, 4), torch.zeros(1, 3, dtype=torch.bool), torch.zeros(1, 1, 3), True,
        lambda v, y: (v - TARGET).square().sum((1, 2, 3)) - (wanted * y.log()).sum((1, 2)), 30, what="test",
    )  # fmt: skip
    torch.testing.assert_close(found.labels[0], wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("learn_labels", [False, True])
def test_dlg_in_its_original_form_reads_a_short_sentence(load, learn_labels):
    model = load("roberta", layers=1)
    batch = batch_of(model, sentences((3,), 3), [1])
    seen = seen_of(Client(model), batch, given=Given(labels=True, lengths=True))
    attack = Dlg(optimizer="lbfgs", steps=20, restarts=2, learn_labels=learn_labels)
    found = attack(seen, stream(0, "attack"))
    words, mine = set(model.content(found.sequences[0])), set(model.content(batch.ids[0].tolist()))
    assert len(words & mine) >= 2
    assert found.labels == (1,)
    assert found.details["labels"] == ("learned" if learn_labels else "given")


@pytest.mark.parametrize("learn", ["clamp", None])
def test_masks_and_labels_stay_shares(load, learn):
    """At a rate at which a free step would leave [0, 1] at once."""
    model = load("bert")
    batch = batch_of(model, sentences((4,), 1), [1])
    objective, masks = Objective(seen_of(Client(model), batch), L2()), Masks(1, torch.Generator().manual_seed(0))
    labels = torch.full((1, 1, 2), 0.5) if learn else torch.tensor([[1]])
    start = model.word_vectors()[batch.ids][None]

    def loss(vectors: Tensor, targets: Tensor) -> Tensor:
        return objective(vectors, batch.mask, targets, masks)

    descent = Descent(start, ~batch.mask, labels, learn, Schedule(3, 5.0), masks)
    for _ in range(3):
        descent.step(loss)
        values = torch.cat([m.detach().flatten() for m in masks.variables()])
        assert float(values.min()) >= 0
        assert float(values.max()) <= 1
        assert float(descent.labels.detach().min()) >= 0
        assert float(descent.labels.detach().max()) <= 1
    assert 0 < float((values == 0).float().mean()) < 1


def test_what_diverged_is_never_the_best():
    def point(at: float, *losses: float) -> Point:
        return Point(torch.full((len(losses), 1, 1, 1), at), NO_LABELS, torch.tensor(losses), 0)

    nan = float("nan")
    best = better(better(point(0.0, nan, 1.0, 2.0), point(1.0, 3.0, nan, 1.5)), point(2.0, nan, nan, nan))
    assert best.loss.tolist() == [3.0, 1.0, 1.5]
    assert best.embeddings.flatten().tolist() == [1.0, 0.0, 1.0]


def test_a_start_that_diverged_does_not_win(load, monkeypatch):
    model = load("bert")
    batch = batch_of(model, sentences((3,), 3), [1])
    seen = seen_of(Client(model), batch, given=Given(labels=True, lengths=True))
    vectors = model.word_vectors()[batch.ids].expand(2, *batch.ids.shape, -1)
    ends = Point(vectors.clone(), torch.ones(2, 1, dtype=torch.long), torch.tensor([float("nan"), 0.5]), 2)
    ends.embeddings[0, 0, 1:-1] = model.word_vectors()[batch.ids[0, :1]]
    monkeypatch.setattr(harness, "minimize", lambda *_, **__: ends)
    found = Dlg(steps=1, restarts=2)(seen, stream(0, "attack"))
    assert list(found.sequences[0]) == batch.ids[0].tolist()
    assert found.details["distance"] == 0.5


def test_the_best_iterate_comes_with_its_masks():
    """A rate so high that the start stays the best: it comes back with the masks of the start, which were 0 or 1."""
    masks, start = Masks(1, torch.Generator().manual_seed(0)), torch.zeros(1, 1, 3, 4)

    def loss(vectors: Tensor, labels: Tensor) -> Tensor:
        dropped = masks.at(1)(0, vectors[:, 0] + 1, 0.5)
        return (vectors - 0.01).square().sum((1, 2, 3)) + (dropped - 0.9).square().sum((1, 2))

    descent = Descent(start, torch.zeros(1, 3, dtype=torch.bool), NO_LABELS, None, Schedule(4, 3.0), masks)
    best = minimize(descent, loss, 4, keep_best=True, what="test")
    assert torch.equal(best.embeddings, start)
    assert float(loss(descent.vectors, NO_LABELS).detach()) > float(best.loss)
    assert set(masks.variables()[0].detach().unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(loss(best.embeddings, NO_LABELS).detach(), best.loss)
