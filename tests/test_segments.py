"""Sentence pairs: an attack that does not look for second sentences says so, and only where there are some."""

from __future__ import annotations

import pytest
import torch

import gradaudit
from gradaudit.bundles.bundle import load_bundle
from gradaudit.leakage.segments import UNREAD, second_segments
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from tiny_models import sentences


def seen_of_pairs(model, folder, segments=2):
    """Return the update of two pairs of three and three words, made by a training loop of transformers' own."""
    every = [model.tokenizer(text)["input_ids"] for text in sentences((3,) * 4, 1)]
    ids = torch.tensor([every[0] + every[1][1:], every[2] + every[3][1:]])
    types = torch.zeros_like(ids)
    types[:, len(every[0]) :] = segments - 1
    model.module.zero_grad()
    with gradaudit.capture(model.module, folder, tokenizer=model.tokenizer):
        model.module(input_ids=ids, token_type_ids=types, labels=torch.tensor([0, 1])).loss.backward()
    return load_bundle(folder).observation(Selection("all"))


@pytest.mark.parametrize("attack", ["decode", "dager", "auto"])
def test_an_update_of_sentence_pairs_is_called_one(load, tmp_path, attack):
    seen = seen_of_pairs(load("bert", "classification"), tmp_path / "pairs")
    fields = {"suite": ["decode"]} if attack == "auto" else {}
    assert build("attack", attack, fields)(seen, stream(0, "attack")).notes.count(UNREAD) == 1
    assert UNREAD not in build("attack", "blind", {})(seen, stream(0, "attack")).notes


def test_nothing_is_said_of_single_sentences_of_noise_and_of_tables_that_were_not_sent(load, tmp_path):
    model = load("bert", "classification")
    single, pairs = (seen_of_pairs(model, tmp_path / str(n), n).tensors for n in (1, 2))
    assert not second_segments(model, single)
    assert second_segments(model, pairs)
    assert not second_segments(model, {n: tensor + 1e-3 * torch.randn(tensor.shape) for n, tensor in pairs.items()})
    for name in (*model.group("word"), *model.group("segment")):
        assert not second_segments(model, {n: tensor for n, tensor in pairs.items() if n != name})
