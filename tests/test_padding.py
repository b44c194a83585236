"""Batches padded on the left: the loss is that of the same sentences, and decoders' rows sit at later positions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from gradaudit.case import parse_case
from gradaudit.client.client import Client
from gradaudit.errors import BadInputError
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given
from tiny_models import DECODERS, ENCODERS, batch_of, seen_of, sentences


def left(model) -> Client:
    return Client(model, padding="left")


@pytest.mark.parametrize("family", DECODERS)
def test_the_gradient_is_that_of_transformers_own_model_padded_on_the_left(load, family):
    model = load(family)
    model.module.config.pad_token_id = model.special.pad  # transformers looks for the last token that is none
    batch = batch_of(model, sentences([5, 2, 3], 1))
    rows = batch.sequences()
    ids = torch.tensor([[model.special.pad] * (5 - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (5 - len(r)) + [1] * len(r) for r in rows])
    loss = model.module(
        input_ids=ids, attention_mask=mask, labels=batch.labels, position_ids=torch.arange(5)[None]
    ).loss
    wanted = [model.views(layer, role)[0].parameter for layer in (0, 1) for role in "qp"]
    own = torch.autograd.grad(loss, [model.parameters()[n] for n in wanted])
    sent = left(model).update(batch, stream(0, "client")).tensors
    for name, expected in zip(wanted, own, strict=True):
        torch.testing.assert_close(sent[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("task", ["classification", "causal-lm"])
def test_positions_move_the_gradient_of_gpt2_and_not_of_llama(load, task):
    for family, same in (("gpt2", False), ("llama", True)):
        model = load(family, task=task)
        batch = batch_of(model, sentences([5, 2], 1), [0, 1] if task == "classification" else None)
        name = model.views(1, "v")[0].parameter
        one, other = (c.update(batch, stream(0, "client")).tensors[name] for c in (Client(model), left(model)))
        assert torch.allclose(one, other, atol=1e-6) is same


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("family", DECODERS)
def test_dager_reads_batches_padded_on_the_left(load, family, seed, given):
    """Sentences of one length start together; nobody tells the attack on which side the padding was."""
    model = load(family)
    batch = batch_of(model, sentences([5, 3, 5, 2, 4, 3], seed))
    seen = seen_of(left(model), batch, given=Given(batch_size=given))
    found = build("attack", "dager", {})(seen, stream(0, "attack"))
    assert Counter(found.sequences) == Counter(tuple(s) for s in batch.sequences())


@pytest.mark.parametrize("family", DECODERS)
def test_nothing_starts_later_in_a_batch_padded_on_the_right(load, family):
    """Batch size unknown, so later starts are looked for too."""
    model = load(family)
    batch = batch_of(model, sentences([6, 3, 4, 2], 5))
    found = build("attack", "dager", {})(seen_of(Client(model), batch, given=Given(batch_size=False)), stream(0, "a"))
    assert Counter(found.sequences) == Counter(tuple(s) for s in batch.sequences())


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_is_not_padded_on_the_left(load, family):
    with pytest.raises(BadInputError, match="for decoders"):
        left(load(family))


def test_a_case_says_so_and_one_without_it_keeps_its_id():
    plain = {"data": {"path": "x.csv", "text": "t", "label": "l"}, "attack": {"name": "dager"}}
    usual, other = (parse_case(plain | {"client": {"padding": side}}) for side in ("right", "left"))
    assert parse_case(plain).content_hash() == usual.content_hash() != other.content_hash()
    assert "padded on the left" in other.setting()


def test_padding_predicts_nothing_and_single_losses_agree(load):
    """Padding on the left stands before the first token, which nothing real predicts."""
    model = load("llama", task="causal-lm")
    rows = torch.tensor([[5, 6, 7, 8], [model.special.pad, model.special.pad, 9, 4]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    whole = model.loss(ids=rows, mask=mask, labels=rows)
    alone = [model.loss(ids=r[None], mask=torch.ones_like(r)[None], labels=r[None]) for r in (rows[0], rows[1, 2:])]
    torch.testing.assert_close(whole, (3 * alone[0] + alone[1]) / 4)
    single = model.traced(embeddings=model.word_vectors()[rows], mask=mask, labels=rows, watch=[]).losses
    torch.testing.assert_close(single, torch.stack([3 * alone[0], alone[1]]))
