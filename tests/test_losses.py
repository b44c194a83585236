"""What the client minimizes: a squared loss is the formula's, and attacks read it as they read cross-entropy."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from gradaudit.case import parse_case
from gradaudit.client.client import Client
from gradaudit.leakage.labels import analytic_label
from gradaudit.models.transformers import TransformersModel
from gradaudit.registry import build
from gradaudit.streams import stream
from tiny_models import DECODERS, FAMILIES, SETTINGS, batch_of, doubled, seen_of, sentences


def squared(model: TransformersModel) -> TransformersModel:
    """Return a copy of a model that is trained with the squared loss."""
    twin = doubled(model)
    twin.module.float()
    return TransformersModel(twin.module, twin.tokenizer, dataclasses.replace(model.spec, loss="squared"))


@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_the_squared_loss_is_the_distance_from_one_hot_labels(load, family, task):
    model = squared(load(family, task=task))
    batch = batch_of(model, sentences([4, 2], 3))
    mask = batch.mask.long()
    logits = model.logits(ids=batch.ids, mask=mask)
    total, count = torch.zeros(()), 0
    for row in range(2):
        places = [(row, int(batch.labels[row]))] if task == "classification" else []
        if task == "causal-lm":
            places = [((row, t), int(batch.ids[row, t + 1])) for t in range(int(mask[row].sum()) - 1)]
        for place, label in places:
            one = torch.zeros(logits.shape[-1])
            one[label] = 1
            total, count = total + (logits[place] - one).square().sum(), count + 1
    labels = batch.labels if task == "classification" else batch.ids
    torch.testing.assert_close(model.loss(ids=batch.ids, mask=mask, labels=labels), total / count)
    with torch.enable_grad():
        table = model.word_vectors()[batch.ids]
        traced = model.traced(embeddings=table, mask=mask, labels=labels, watch=[])
    torch.testing.assert_close(traced.losses.sum() / count, total / count)


@pytest.mark.parametrize("task", ["classification", "causal-lm"])
@pytest.mark.parametrize("family", DECODERS)
def test_dager_is_exact_under_it(load, family, task):
    model = squared(load(family, task=task))
    batch = batch_of(model, sentences([3, 5, 4], 2), [0, 1, 0] if task == "classification" else None)
    found = build("attack", "dager", {})(seen_of(Client(model), batch), stream(0, "attack"))
    whole = [tuple(s) for s in batch.sequences()]
    # of a next-token loss the last token leaves nothing
    expected = whole if task == "classification" else [s[:-1] for s in whole]
    assert Counter(found.sequences) == Counter(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_label_is_read_off_the_head_under_it(load, family):
    model = squared(load(family, labels=4))
    for label in range(4):
        seen = seen_of(Client(model), batch_of(model, sentences([4], label), [label]))
        assert analytic_label(seen) is None


def test_a_case_without_it_keeps_its_id_and_one_with_it_has_its_own():
    plain = {"data": {"path": "x.csv", "text": "t", "label": "l"}, "attack": {"name": "dager"}}
    usual, other = (parse_case(plain | {"loss": loss}) for loss in ("cross-entropy", "squared"))
    assert parse_case(plain).content_hash() == usual.content_hash() != other.content_hash()
    assert "squared loss" in other.setting()
    assert "loss" not in usual.setting()
