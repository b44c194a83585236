"""Proofs hold whatever an honest client's loss was, and go where what else was shared speaks against them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tiny_models
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.leakage.decoding.rows import MaskedInputs, Search, find_rows
from gradaudit.leakage.decoding.taking_out import take_out
from gradaudit.leakage.rowspace.deflation import Remainder, matrices, remainder
from gradaudit.leakage.rowspace.subspace import span
from gradaudit.models.transformers import TransformersModel
from gradaudit.streams import stream
from gradaudit.types import Batch, LocalTraining, Observation

EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> TransformersModel:
    return tiny_models.tiny(tiny_models.make_folder("bert", tmp_path_factory.mktemp("bert")), labels=4)


def of(model: TransformersModel, seed: int) -> Batch:
    labels = [label % model.spec.labels for label in (3, 0, 2)]
    return tiny_models.batch_of(model, tiny_models.sentences((4, 3, 4), seed), labels)


def seen_of(model: TransformersModel, batch: Batch, smoothing: float = 0.0) -> Observation:
    return tiny_models.seen_of(Client(model, LocalTraining(label_smoothing=smoothing)), batch)


def added(model: TransformersModel, batch: Batch, weights: tuple[float, ...], smoothing: float) -> Observation:
    """Return what backward passes of one sentence each add up to, each loss with its own weight."""
    parts = [
        seen_of(model, Batch(batch.ids[[i]], batch.mask[[i]], batch.labels[[i]], ()), smoothing)
        for i in range(len(batch.ids))
    ]
    whole = {n: sum(w * p.tensors[n] for w, p in zip(weights, parts, strict=True)) for n in parts[0].tensors}
    return dataclasses.replace(parts[0], tensors=whole)


def left_of(seen: Observation) -> Remainder:
    return remainder(matrices(seen, 3), EPS)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1e-6,) * 3, (1e6,) * 3, (0.3, 1.7, 1.0), (1024.0, 300.0, 50.0)])
def test_a_sentence_is_proven_under_any_weight_and_smoothed_labels(bert, weights, smoothing: float):
    batch = of(bert, 1)
    rest = left_of(added(bert, batch, weights, smoothing))
    for sentence, label in zip(map(tuple, batch.sequences()), batch.labels.tolist(), strict=True):
        taken = take_out(bert, rest, sentence, [1 / 3], [1, 2])
        assert taken is not None
        assert taken.proven
        assert taken.label == label
        decoy = (*sentence[:2], sentence[3], sentence[2], *sentence[4:])
        false = take_out(bert, rest, decoy, [1 / 3], [1, 2])
        assert false is None or not false.proven


def test_a_sentence_that_was_there_under_several_labels_is_proven_once_and_no_label_is_told(bert):
    batch = of(bert, 1)
    twice = Batch(batch.ids[[0, 0, 1]], batch.mask[[0, 0, 1]], torch.tensor([3, 1, 0]), ())
    taken = take_out(bert, left_of(seen_of(bert, twice)), tuple(batch.sequences()[0]), [1 / 3], [1, 2])
    assert taken is not None
    assert taken.proven
    assert taken.share is None, "no one label's gradient was in it"


def test_attention_dropout_alone_leaves_clean_words_which_no_deeper_block_checks(tmp_path):
    model = tiny_models.tiny(tiny_models.make_folder("bert", tmp_path / "bert"))
    for name, part in model.module.named_modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.4 if name.endswith("attention.self.dropout") else 0.0
    batch = of(model, 1)
    seen = tiny_models.seen_of(Client(model, dropout=True), batch)
    assert seen.knowledge.dropout == 0.4
    found = Decode()(seen, stream(0, "attack"))
    assert "attention dropout alone" in found.notes[0]
    assert found.certificates == ("guess",) * 3
    right = {word for sentence in batch.sequences() for word in sentence}
    assert 2 * len(right & {word for sentence in found.sequences for word in sentence}) > len(right)


def forged(kind: str, seen: Observation, other: Observation) -> dict[str, torch.Tensor]:
    """Return an update whose queries, keys and values, which prove, are a batch's, and the rest is not."""
    proving = {view.parameter for layer in range(3) for role in "qkv" for view in seen.model.views(layer, role)}
    rng = torch.Generator().manual_seed(0)
    rest = {
        "noise": lambda n, t: torch.randn(t.shape, generator=rng) * t.norm() / t.numel() ** 0.5,
        "another batch": lambda n, t: other.tensors[n],
        "other side": lambda n, t: -t,
        "head alone": lambda n, t: other.tensors[n] if n in seen.model.group("head") else t,
        "words alone": lambda n, t: other.tensors[n] if n in seen.model.group("word") else t,
        "none": lambda n, t: t,
    }[kind]
    return {n: t if n in proving else rest(n, t) for n, t in seen.tensors.items()}


@pytest.mark.parametrize("kind", ["noise", "another batch", "other side", "head alone", "words alone", "none"])
def test_what_else_was_shared_speaks_against_a_forged_update(bert, kind: str):
    seen, other = seen_of(bert, of(bert, 1)), seen_of(bert, of(bert, 5))
    found = Decode()(dataclasses.replace(seen, tensors=forged(kind, seen, other)), stream(0, "attack"))
    assert set(found.sequences) == set(map(tuple, of(bert, 1).sequences()))
    assert found.certificates == ("proven" if kind == "none" else "likely",) * 3
    assert any("honest" in note for note in found.notes) is (kind != "none")


def test_a_text_that_holds_a_special_token_costs_no_other_sentence_its_proof(bert):
    texts = [f"{tiny_models.WORDS[3]} [CLS] {tiny_models.WORDS[9]}", " ".join(tiny_models.WORDS[11:15])]
    batch = tiny_models.batch_of(bert, texts, [0, 1])
    literal, plain = map(tuple, batch.sequences())
    assert literal.count(bert.tokenizer.cls_token_id) == 2
    found = Decode()(seen_of(bert, batch), stream(0, "attack"))
    told = dict(zip(found.sequences, found.certificates, strict=True))
    assert told.pop(plain) == "proven"
    assert set(told.values()) <= {"guess"}


@pytest.mark.parametrize("rates", [(0.0, 0.4), (0.1, 0.1)])
def test_no_more_rows_are_decoded_than_the_space_has_dimensions(tmp_path, rates):
    """101 were, of 75: dropout on attention alone, which masks no row of block 0."""
    model = tiny_models.tiny(tiny_models.make_folder("bert", tmp_path / "bert"))
    for name, part in model.module.named_modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = rates[name.endswith("attention.self.dropout")]
    first = span(tiny_models.seen_of(Client(model, dropout=True), of(model, 1)), 0)
    found = find_rows(MaskedInputs(model, first), Search(None, 200, 512), stream(0, "attack"))
    assert 0 < len(found) <= first.rank
