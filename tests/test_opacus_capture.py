"""A model in Opacus' PrivacyEngine: the private gradient is captured, and its mechanism checked."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader

import gradaudit as package
from gradaudit.bundles.bundle import load_bundle
from gradaudit.errors import BadInputError
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from tiny_models import sentences

TEXTS = sentences([4, 4, 4], seed=4)
CLIP, NOISE = 0.7, 0.3


def private(folders, noise: float = NOISE) -> tuple[Any, Any, Any, Any]:
    """A tiny model without its embeddings, its optimizer and tokenizer, as a PrivacyEngine makes them, and its rows."""
    made = load_model(ModelSpec(f"random:{folders['bert']}"))
    made.module.train()
    for name, p in made.module.named_parameters():
        p.requires_grad_("embeddings" not in name)
    batch = made.tokenizer(TEXTS, return_tensors="pt")
    rows = DataLoader(list(zip(batch["input_ids"], torch.tensor([1, 0, 1]), strict=True)), batch_size=3)
    given = [p for p in made.module.parameters() if p.requires_grad]
    model, optimizer, _ = PrivacyEngine().make_private(
        module=made.module, optimizer=torch.optim.SGD(given, lr=0.1), data_loader=rows,
        noise_multiplier=noise, max_grad_norm=CLIP, poisson_sampling=False,
    )  # fmt: skip
    return model, optimizer, made.tokenizer, (batch["input_ids"], torch.tensor([1, 0, 1]))


def test_the_private_gradient_and_its_mechanism_are_in_the_bundle(folders, tmp_path):
    model, optimizer, tokenizer, (ids, labels) = private(folders)
    before = {name: p.detach().clone() for name, p in model._module.named_parameters()}
    with package.capture(model, tmp_path / "up", tokenizer=tokenizer, optimizer=optimizer):
        model(input_ids=ids, labels=labels).loss.backward()
        clean = {name: p.grad.clone() for name, p in model._module.named_parameters() if p.grad is not None}
        optimizer.step()
    bundle = load_bundle(tmp_path / "up")
    assert bundle.tensors
    for name, value in bundle.tensors.items():  # plain descent went along exactly what is in the bundle
        moved = (before[name] - dict(model._module.named_parameters())[name].detach()) / 0.1
        torch.testing.assert_close(value, moved, rtol=1e-3, atol=1e-5)
    noise = torch.cat([value.flatten() for value in bundle.tensors.values()])
    assert float(noise.std()) == pytest.approx(NOISE * CLIP / 3, rel=0.1), "noise, and not the batch's own gradient"
    assert not torch.allclose(bundle.tensors["classifier.weight"], clean["classifier.weight"], atol=1e-3)
    known = bundle.manifest.knowledge
    assert known["batch_size"] == 3
    assert known["defenses"] == [{"name": "dp-sgd", "clip": CLIP, "noise_multiplier": NOISE}]
    told = {"mechanism": "dp-sgd", "clip": CLIP, "noise_multiplier": NOISE, "batch_size": 3, "steps": 1}
    assert bundle.manifest.mechanism is not None
    assert bundle.manifest.mechanism.model_dump() == told


def test_the_claim_of_a_bundle_is_checked(folders, tmp_path, gradaudit):
    model, optimizer, tokenizer, (ids, labels) = private(folders, noise=0.0)  # void, which no accountant need say
    with package.capture(model, tmp_path / "up", tokenizer=tokenizer, what="delta", optimizer=optimizer):
        for _ in range(2):
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    where = ("claims", tmp_path / "up", "--json")
    code, _, err = gradaudit(*where)
    assert code == 2
    assert "--set examples=8551 --set sampling=poisson" in err
    declared = ("--set", "declared_epsilon=8", "--set", "unit=example")
    code, out, err = gradaudit(*where, "--set", "examples=300", "--set", "sampling=poisson", *declared)
    assert code == 1, err
    found = json.loads(out)
    assert (found["verdict"], found["void"]) == ("void", ["the noise is zero"])
    told = {"noise_multiplier": 0.0, "batch_size": 3, "steps": 2, "examples": 300, "name": "up"}
    assert {key: found["claim"][key] for key in told} == told
    code, _, err = gradaudit(*where, "--set", "examples=2", "--set", "sampling=poisson")
    assert code == 2
    assert "more than the 2 examples" in err


def test_a_bundle_without_a_mechanism_has_no_claim_and_says_so(folders, tmp_path, gradaudit):
    model, optimizer, tokenizer, (ids, labels) = private(folders)
    with package.capture(model, tmp_path / "up", tokenizer=tokenizer):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    assert load_bundle(tmp_path / "up").manifest.knowledge["defenses"] is None
    code, _, err = gradaudit("claims", tmp_path / "up")
    assert code == 2
    assert "names no mechanism" in err
    code, _, err = gradaudit("claims", tmp_path / "none.toml", "--set", "examples=1")
    assert code == 2
    assert "--set completes the claim of a bundle" in err


def test_what_is_not_private_yet_is_not_captured(folders, tmp_path):
    model, _, tokenizer, (ids, labels) = private(folders)
    with pytest.raises(BadInputError, match="made by its step"), package.capture(
        model, tmp_path / "up", tokenizer=tokenizer
    ):  # fmt: skip
        model(input_ids=ids, labels=labels).loss.backward()
    plain = torch.optim.SGD(model._module.parameters(), lr=0.1)
    with pytest.raises(BadInputError, match="DPOptimizer"), package.capture(
        model, tmp_path / "up", tokenizer=tokenizer, optimizer=plain
    ):  # fmt: skip
        raise AssertionError("training began")
    assert not (tmp_path / "up").exists()
