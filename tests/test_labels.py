"""Labels read from the output layer: right where the gradient determines them, None where it does not."""

from __future__ import annotations

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.leakage.labels import analytic_label, single_label
from gradaudit.types import Given, LocalTraining
from tiny_models import FAMILIES, batch_of, seen_of, sentences


def closed_form(classes: int, label: int, scale: float, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bias and weight gradients of softmax cross-entropy for one hidden vector."""
    hidden, logits = torch.randn(8, generator=rng), scale * torch.randn(classes, generator=rng)
    error = logits.softmax(0)
    error[label] -= 1.0
    return error, torch.outer(error, hidden)


@pytest.mark.parametrize("classes", [2, 3, 4, 5])
def test_label_is_right_in_every_draw(classes):
    rng = torch.Generator().manual_seed(classes)
    for draw in range(200):
        label = draw % classes
        bias, weight = closed_form(classes, label, 1.0, rng)
        assert single_label(bias, weight) == label
        assert single_label(bias, None) == label
        assert single_label(None, weight) == (label if classes > 2 else None)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_label_is_never_wrong_even_when_probabilities_underflow(classes):
    rng = torch.Generator().manual_seed(classes)
    read = 0
    for draw in range(200):
        label = draw % classes
        bias, weight = closed_form(classes, label, 60.0, rng)
        for found in (single_label(bias, weight), single_label(None, weight)):
            assert found in (label, None)
            read += found is not None
    assert read > 0


def test_two_classes_without_bias_cannot_be_told():
    """Both labels give the same gradient for hidden vectors of opposite sign: any answer would be a coin toss."""
    hidden = torch.tensor([1.0, -2.0, 0.5])
    weights = [torch.outer(torch.tensor(e), h) for e, h in (([-0.5, 0.5], hidden), ([0.5, -0.5], -hidden))]
    assert torch.equal(weights[0], weights[1])
    assert single_label(None, weights[0]) is None
    assert single_label(None, None) is None
    assert single_label(torch.zeros(3), torch.zeros(3, 4)) is None
    assert single_label(None, torch.zeros(3, 4)) is None


def test_rows_that_no_single_sentence_makes_are_not_read():
    """Of one sentence, only the label's row opposes the others; where all oppose all, it was noised or mixed."""
    assert single_label(None, torch.tensor([[1.0, 0.0], [-0.1, 1.0], [-0.1, -1.0]])) is None
    assert single_label(None, torch.tensor([[1.0, 0.0], [-0.5, 0.1], [-0.5, -0.1]])) == 0
    assert single_label(torch.tensor([-0.5, -0.2, 0.7]), None) is None


@pytest.mark.parametrize("classes", [2, 3, 4, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_label_of_a_real_update(load, family, classes):
    model = load(family, labels=classes)
    has_bias = family not in ("gpt2", "llama")
    for label in range(classes):
        batch = batch_of(model, sentences((5,), label), [label])
        expected = label if has_bias or classes > 2 else None
        assert analytic_label(seen_of(Client(model), batch)) == expected
        assert analytic_label(seen_of(Client(model), batch, "head")) == expected
        change = Client(model, LocalTraining("sgd", 0.1))
        assert analytic_label(seen_of(change, batch)) == expected


def test_label_is_none_where_it_cannot_be_read(load):
    model = load("bert")
    one, two = batch_of(model, sentences((5,), 0), [1]), batch_of(model, sentences((5, 4), 0), [1, 1])
    assert analytic_label(seen_of(Client(model), one)) == 1
    assert analytic_label(seen_of(Client(model), two)) is None, "more than one sentence"
    assert analytic_label(seen_of(Client(model), one, given=Given(batch_size=False))) is None
    assert analytic_label(seen_of(Client(model), one, "*:q,k")) is None, "the head was not shared"
    assert analytic_label(seen_of(Client(model), one, given=Given(labels=True))) == 1
    change = Client(model, LocalTraining("sgd", 0.1))
    assert analytic_label(seen_of(change, one, given=Given(training=False))) is None
    adamw = Client(model, LocalTraining("adamw"))
    assert analytic_label(seen_of(adamw, one)) is None, "not a gradient"
    text = load("gpt2", "causal-lm")
    assert analytic_label(seen_of(Client(text), batch_of(text, sentences((5,), 0)))) is None
