"""Exact decoding on the real MiniLM with dropout on: exact, certified, and silent where it must be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradaudit.attacks.decode import Decode, _Decoder, certificate
from gradaudit.client import Client
from gradaudit.data.source import SAMPLE, DataSpec, load_rows, make_batch
from gradaudit.errors import NotSupportedError
from gradaudit.models.base import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Batch, Given, Observation

pytestmark = pytest.mark.minilm


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


def batch_of(model, first: int, size: int) -> Batch:
    rows = load_rows(DataSpec(path=str(SAMPLE), label="label"), Path.cwd())
    assert rows.labels is not None
    return make_batch(model, rows.texts[first : first + size], rows.labels[first : first + size])


def seen_of(model, batch: Batch, given: Given | None = None, selection: str = "0:q,k,v", **how) -> Observation:
    client = Client(model, **({"dropout": True, "freeze": ("embeddings",)} | how))
    return client.observe(batch, Selection(selection), given or Given(), stream(3, "client"))


def truth(batch: Batch) -> set[tuple[int, ...]]:
    return {tuple(s) for s in batch.sequences()}


@pytest.mark.parametrize(("first", "size"), [(4, 1), (8, 2), (12, 4)])
def test_the_practical_setting_is_read_back_exactly_and_proven(minilm, first: int, size: int):
    batch = batch_of(minilm, first, size)
    found = Decode()(seen_of(minilm, batch), stream(0, "attack"))
    assert set(found.sequences) == truth(batch)
    assert found.certificates == ("proven",) * size
    assert found.details["estimated_dropout"] == pytest.approx(0.1, abs=0.02)


def test_nothing_beside_the_gradient_need_be_given(minilm):
    batch = batch_of(minilm, 20, 2)
    nothing = Given(batch_size=False, training=False, dropout=False, defenses=False)
    found = Decode()(seen_of(minilm, batch, nothing), stream(0, "attack"))
    assert set(found.sequences) == truth(batch)


def test_the_same_words_twice_are_told_apart(minilm):
    text = "Rufus owes Clara 900 euros."
    batch = make_batch(minilm, [text, text, "Tobias owes Clara nothing."], [0, 1, 1])
    found = Decode()(seen_of(minilm, batch), stream(0, "attack"))
    assert sorted(found.sequences) == sorted(tuple(s) for s in batch.sequences())


def test_swapped_gradients_give_their_own_text_and_not_another_batch(minilm):
    mine, other = batch_of(minilm, 4, 2), batch_of(minilm, 30, 2)
    found = Decode()(seen_of(minilm, other), stream(0, "attack"))
    assert not set(found.sequences) & truth(mine)


def test_pure_noise_proves_nothing(minilm):
    seen = seen_of(minilm, batch_of(minilm, 4, 2))
    rng = torch.Generator().manual_seed(0)
    noise = {n: torch.randn(t.shape, generator=rng) * t.norm() / t.numel() ** 0.5 for n, t in seen.tensors.items()}
    found = Decode()(dataclasses.replace(seen, tensors=noise), stream(0, "attack"))
    assert "proven" not in (found.certificates or ())
    assert found.sequences == ()
    assert any("not identifiable" in note for note in found.notes)


def test_a_sentence_with_a_foreign_token_is_not_proven(minilm):
    # two updates added up, of which one is without dropout: half of the rows cannot be decoded
    noisy = seen_of(minilm, batch_of(minilm, 4, 2))
    plain = seen_of(minilm, batch_of(minilm, 30, 2), dropout=False)
    mixed = {n: t + plain.tensors[n] for n, t in noisy.tensors.items()}
    found = Decode()(dataclasses.replace(noisy, tensors=mixed), stream(0, "attack"))
    right = truth(batch_of(minilm, 4, 2)) | truth(batch_of(minilm, 30, 2))
    proven = [s for s, c in zip(found.sequences, found.certificates or (), strict=True) if c == "proven"]
    assert set(proven) <= right


@pytest.mark.parametrize(
    ("how", "said"),
    [({"dropout": False}, "dropout"), ({"selection": "0:v"}, "query and key"), ({"selection": "1:q"}, "query")],
)
def test_what_it_cannot_do_is_said(minilm, how, said: str):
    with pytest.raises(NotSupportedError, match=said):
        Decode()(seen_of(minilm, batch_of(minilm, 4, 1), **how), stream(0, "attack"))


def test_decoders_are_not_supported(load):
    import tiny_models

    model = load("gpt2")
    seen = tiny_models.seen_of(Client(model, dropout=True), tiny_models.batch_of(model, ["river stone"]))
    with pytest.raises(NotSupportedError, match="encoders"):
        Decode()(seen, stream(0, "attack"))


@pytest.mark.parametrize(
    ("positions", "change", "complete"),
    [
        ([0, 1, 2, 3], {}, True),
        ([0, 1, 3, 4], {}, False),  # a hole
        ([1, 2, 3, 4], {}, False),  # the beginning is missing
        ([0, 1, 2, 3], {0: 2000}, False),  # does not start with [CLS]
        ([0, 1, 2, 3], {3: 2000}, False),  # does not end with [SEP]
        ([0, 1, 2, 3], {2: 102}, False),  # ends in its middle
    ],
)
def test_only_a_whole_sentence_is_complete(minilm, positions, change, complete):
    ids = [101, 2003, 2004, 102]
    for at, token in change.items():
        ids[at] = token
    assert _Decoder._complete(SimpleNamespace(model=minilm), ids, positions) is complete


@pytest.mark.parametrize(
    ("complete", "unexplained", "length", "said"),
    [
        (True, 1e-5, 12, "proven"),
        (False, 1e-5, 12, "guess"),
        (True, 1e-2, 12, "likely"),
        (True, 1e-5, 25, "proven"),
        (True, 1e-5, 26, "likely"),  # 0.8 of a head of 32: its own tokens would explain anything
    ],
)
def test_a_proof_needs_all_three(complete: bool, unexplained: float, length: int, said: str):
    assert certificate(complete, unexplained, length, head_width=32) == said
