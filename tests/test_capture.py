"""`gradaudit.capture`: what the optimizer got is what the bundle holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gradaudit
import tiny_models
from gradaudit.bundles.bundle import load_bundle
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.types import LocalTraining


@pytest.fixture
def training(folders):
    """A fresh module with its tokenizer, inputs and labels: what a user's script has."""

    def make(family: str = "bert", task: str = "classification"):
        model = load_model(ModelSpec(f"random:{folders[family]}", task))
        inputs = model.tokenizer(tiny_models.sentences([4, 6], seed=2), padding=True, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        labels = torch.tensor([1, 0]) if task == "classification" else inputs["input_ids"]
        return model.module, model.tokenizer, inputs, labels

    return make


def gradient_of(module, inputs, labels) -> dict[str, torch.Tensor]:
    module.zero_grad()
    module(**inputs, labels=labels).loss.backward()
    found = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_the_gradient_is_the_one_before_the_step(training, tmp_path: Path, family: str):
    module, tokenizer, inputs, labels = training(family)
    expected = gradient_of(module, inputs, labels)
    weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    with gradaudit.capture(module, tmp_path / "b", tokenizer=tokenizer) as seen:
        module(**inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen.sentences == 2
    back = load_bundle(tmp_path / "b")
    assert set(back.tensors) == set(expected)
    assert all(torch.allclose(back.tensors[n], g, atol=1e-6) for n, g in expected.items())
    assert all(torch.equal(back.model.parameters()[n], w) for n, w in weights.items())
    assert back.manifest.knowledge["batch_size"] == 2


@pytest.mark.parametrize("what", ["gradient", "delta"])
def test_a_model_in_bfloat16_is_read_back_with_its_precision(training, tmp_path: Path, what):
    module, tokenizer, inputs, labels = training()
    module.to(torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    weights = {n: p.detach().float() for n, p in module.named_parameters()}
    told = LocalTraining("sgd", 0.1) if what == "delta" else None
    with gradaudit.capture(module, tmp_path / "b", tokenizer=tokenizer, what=what, training=told):
        module(**inputs, labels=labels).loss.backward()
        sent = {n: p.grad.float() for n, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
    back = load_bundle(tmp_path / "b")
    assert back.manifest.knowledge["training"]["precision"] == "bf16-weights"
    assert all(torch.equal(back.model.parameters()[n], w) for n, w in weights.items())
    if what == "delta":
        sent = {n: p.detach().float() - weights[n] for n, p in module.named_parameters()}
    assert all(torch.equal(back.tensors[n].float(), t) for n, t in sent.items())


def test_weights_that_fit_in_bfloat16_alone_say_nothing(training, tmp_path: Path):
    """As a model loaded from such a file, and trained in float32."""
    module, tokenizer, inputs, labels = training()
    for p in module.parameters():
        p.data = p.data.bfloat16().float()
    with gradaudit.capture(module, tmp_path / "b", tokenizer=tokenizer):
        module(**inputs, labels=labels).loss.backward()
    assert load_bundle(tmp_path / "b").manifest.knowledge["training"]["precision"] == "fp32"


def test_clipping_is_in_it(training, tmp_path: Path):
    module, tokenizer, inputs, labels = training()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with gradaudit.capture(module, tmp_path / "b", tokenizer=tokenizer):
        module(**inputs, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
        optimizer.step()
    norm = sum(float(t.square().sum()) for t in load_bundle(tmp_path / "b").tensors.values()) ** 0.5
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_without_an_optimizer_the_gradient_at_the_end_counts(training, tmp_path: Path):
    module, tokenizer, inputs, labels = training("gpt2", "causal-lm")
    with gradaudit.capture(module, tmp_path / "b", tokenizer=tokenizer):
        module(**inputs, labels=labels).loss.backward()
    assert load_bundle(tmp_path / "b").model.spec.task == "causal-lm"


def test_a_delta_is_after_minus_before(training, tmp_path: Path):
    module, tokenizer, inputs, labels = training()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with gradaudit.capture(module, tmp_path / "b", tokenizer=tokenizer, what="delta"):
        for _ in range(3):
            optimizer.zero_grad()
            module(**inputs, labels=labels).loss.backward()
            optimizer.step()
    back = load_bundle(tmp_path / "b")
    assert back.manifest.kind == "delta"
    for name, p in module.named_parameters():
        assert torch.allclose(back.tensors[name], p.detach() - before[name], atol=1e-7)
        assert torch.equal(back.model.parameters()[name], before[name])


def test_dropout_is_recorded_as_it_was(training, tmp_path: Path):
    module, tokenizer, inputs, labels = training()
    for mode, rate in ((True, 0.1), (False, 0.0)):
        module.train(mode)
        with gradaudit.capture(module, tmp_path / str(mode), tokenizer=tokenizer):
            module(**inputs, labels=labels).loss.backward()
        module.zero_grad()
        assert load_bundle(tmp_path / str(mode)).manifest.knowledge["dropout"] == pytest.approx(rate)
        assert module.training is mode


def test_two_steps_are_refused_and_say_what_to_do(training, tmp_path: Path):
    module, tokenizer, inputs, labels = training()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with (
        pytest.raises(BadInputError, match="delta"),
        gradaudit.capture(module, tmp_path / "b", tokenizer=tokenizer),
    ):
        for _ in range(2):
            module(**inputs, labels=labels).loss.backward()
            optimizer.step()
    assert not (tmp_path / "b" / "manifest.json").exists()


def test_no_gradient_is_said(training, tmp_path: Path):
    module, tokenizer, _, _ = training()
    with pytest.raises(BadInputError, match="backward"), gradaudit.capture(module, tmp_path / "b", tokenizer=tokenizer):
        pass


def test_an_error_in_the_block_passes_and_leaves_no_hooks(training, tmp_path: Path):
    module, tokenizer, _, _ = training()
    with pytest.raises(ZeroDivisionError), gradaudit.capture(module, tmp_path / "b", tokenizer=tokenizer):
        1 / 0  # noqa: B018
    assert not module._forward_pre_hooks
    assert not (tmp_path / "b").exists()


def test_another_kind_of_model_is_refused(tmp_path: Path):
    with (
        pytest.raises(NotSupportedError, match="Linear"),
        gradaudit.capture(torch.nn.Linear(2, 2), tmp_path, tokenizer=None),
    ):
        pass


def test_a_captured_bundle_is_for_its_owner_alone(training, tmp_path: Path):
    module, tokenizer, inputs, labels = training()
    with gradaudit.capture(module, tmp_path / "made", tokenizer=tokenizer):
        module(**inputs, labels=labels).loss.backward()
    for folder in (tmp_path / "made", tmp_path / "made" / "model"):
        assert folder.stat().st_mode & 0o777 == 0o700, folder
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "made").glob("*.*"))
