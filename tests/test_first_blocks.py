"""A large model's update with its first blocks alone: nothing else is read, and nothing else is claimed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from gradaudit.bundles import bundle
from gradaudit.bundles.examine import examine
from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model, whole_shapes
from gradaudit.streams import stream
from gradaudit.types import Given

CPU = torch.device("cpu")


@pytest.fixture
def made(load, tmp_path: Path):
    model = load("llama")
    client, batch = Client(model), tiny_models.batch_of(model, tiny_models.sentences([4, 3], seed=1))
    update = client.update(batch, stream(0, "client"))
    folder = tmp_path / "update"
    model.module.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    bundle.save_bundle(folder, model, update, knowledge_of(batch, update, Given()), inside=True)
    return folder, batch


def test_two_blocks_read_the_batch_and_later_ones_need_not_even_exist(made):
    folder, batch = made
    path = folder / "model" / "model.safetensors"
    kept = {n: t for n, t in load_file(path).items() if ".layers.2." not in n}
    save_file(kept, path, metadata={"format": "pt"})
    found = examine(folder, "dager", [], "all", None, 0, CPU, blocks=2)
    assert sorted(found.ids) == sorted(map(tuple, batch.sequences()))
    assert any("not checked" in warning for warning in found.warnings)


def test_sentences_that_need_the_output_to_be_proven_are_likely_without_it(made):
    folder, batch = made
    for blocks, certificate in ((None, "proven"), (2, "likely")):
        found = examine(folder, "decode", [], "all", None, 0, CPU, blocks=blocks)
        assert sorted(found.ids) == sorted(map(tuple, batch.sequences()))
        assert found.certificates == (certificate,) * 2
    assert any("only the first 2 blocks" in note for note in found.notes)


def test_depth_is_the_models_and_only_what_was_asked_for_is_there(made):
    folder, _ = made
    part = load_model(ModelSpec(str(folder / "model"), loaded=2))
    whole = load_model(ModelSpec(str(folder / "model")))
    assert (part.depth, len(part.family.blocks)) == (whole.depth, 2) == (3, 2)
    ids = torch.tensor([[4, 5, 6]])
    torch.testing.assert_close(part.attention_inputs(1, ids), whole.attention_inputs(1, ids))
    assert "2 blocks of it loaded" in part.spec.title
    with pytest.raises(NotSupportedError, match="leave --blocks away"):
        part.logits(ids=ids, mask=torch.ones_like(ids))
    assert whole_shapes(whole.spec) == {n: tuple(p.shape) for n, p in whole.parameters().items()}


def test_an_attack_that_needs_the_output_says_so(made):
    with pytest.raises(NotSupportedError, match="leave --blocks away"):
        examine(made[0], "lamp", ["steps=2"], "all", None, 0, CPU, blocks=2)


def test_tensors_of_no_model_are_still_refused(made):
    folder, _ = made
    data = load_file(folder / bundle.TENSORS) | {"model.layers.9.self_attn.q_proj.weight": torch.ones(2, 2)}
    save_file(data, folder / bundle.TENSORS)
    manifest = json.loads((folder / bundle.MANIFEST).read_text())
    manifest["tensors"] = {name: list(t.shape) for name, t in data.items()}
    manifest["sha256"] = bundle._sha256(folder / bundle.TENSORS)
    (folder / bundle.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadInputError, match=r"not of this model.*layers\.9"):
        bundle.load_bundle(folder, blocks=2)


def test_more_blocks_than_there_are_and_random_models_are_refused(made, folders):
    with pytest.raises(BadInputError, match="has 3 blocks"):
        bundle.load_bundle(made[0], blocks=4)
    with pytest.raises(BadInputError, match="made as a whole"):
        load_model(ModelSpec(f"random:{folders['llama']}", loaded=1))
