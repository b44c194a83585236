"""`AuditCallback`: what transformers' Trainer gave its optimizer is in the bundles, and no training breaks by it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

import gradaudit
from gradaudit.bundles.bundle import load_bundle
from gradaudit.bundles.examine import examine
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.integrations.trainer import AuditCallback
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from tiny_models import sentences

TEXTS = sentences([4, 4, 4, 4, 4, 4], seed=4)


def trained(folders, where: Path, callback: AuditCallback, tokenizer: bool = True, **how: Any) -> tuple[Any, Any]:
    """Train a tiny model with a stock Trainer, two sentences a step; return it and its weights before."""
    made = load_model(ModelSpec(f"random:{folders['bert']}"))
    before = {name: value.clone() for name, value in made.module.state_dict().items()}
    rows = [{"labels": n % 2, **made.tokenizer(text)} for n, text in enumerate(TEXTS)]
    told = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 0.01, "optim": "sgd"} | how
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    arguments = TrainingArguments(output_dir=str(where / "trainer"), **told, **quiet)
    words = {"processing_class": made.tokenizer} if tokenizer else {}
    if not tokenizer:
        rows = [{"labels": n % 2, "input_ids": made.tokenizer(text)["input_ids"]} for n, text in enumerate(TEXTS)]
    trainer = Trainer(model=made.module, args=arguments, train_dataset=rows, callbacks=[callback], **words)
    trainer.train()
    return made.module, before


def test_gradients_of_every_second_step_are_what_the_optimizer_got(folders, tmp_path):
    steady = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "label_smoothing_factor": 0.2}
    module, before = trained(folders, tmp_path, AuditCallback(tmp_path / "up", every=2), **steady)
    assert sorted(path.name for path in (tmp_path / "up").iterdir()) == ["step-1", "step-3"]
    first, third = (load_bundle(tmp_path / "up" / f"step-{n}") for n in (1, 3))
    for name, p in first.model.parameters().items():
        assert torch.equal(p, before[name])
    for name, p in module.named_parameters():  # plain descent: the third step led to the weights at the end
        last = third.model.parameters()[name] - 0.01 * third.tensors.get(name, torch.zeros(()))
        torch.testing.assert_close(p, last, rtol=0, atol=1e-6)
    assert first.manifest.kind == "gradient"
    assert first.manifest.knowledge["batch_size"] == 2
    assert first.manifest.knowledge["training"]["label_smoothing"] == pytest.approx(0.2)
    assert first.manifest.knowledge["dropout"] == pytest.approx(0.1)
    assert module.training


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_rounds_are_weight_changes_and_say_how_they_were_made(folders, tmp_path, optim):
    callback = AuditCallback(tmp_path / "up", every=2, what="delta")
    how = {"optim": optim, "lr_scheduler_type": "constant", "label_smoothing_factor": 0.1}
    module, before = trained(folders, tmp_path, callback, **how)
    assert sorted(path.name for path in (tmp_path / "up").iterdir()) == ["round-1", "round-2"]
    first, last = (load_bundle(tmp_path / "up" / name) for name in ("round-1", "round-2"))
    for name, p in module.named_parameters():
        torch.testing.assert_close(first.tensors[name] + last.tensors[name], p - before[name], rtol=0, atol=1e-6)
    told = first.manifest.knowledge
    assert told["batch_size"] == 4
    assert told["training"]["optimizer"] == optim.partition("_")[0]
    assert (told["training"]["minibatch"], told["training"]["clip_norm"]) == (2, 1.0)
    assert told["training"]["label_smoothing"] == pytest.approx(0.1)
    again = last.manifest.knowledge["training"]
    assert (again is None) == (optim == "adamw_torch"), "Adam's second round remembers its first"


@pytest.mark.parametrize(("every", "told"), [(3, "linear"), (2, None), (1, "constant")])
def test_the_trainer_s_falling_rate_is_told_where_it_can_be(folders, tmp_path, every, told):
    callback = AuditCallback(tmp_path / "up", every=every, what="delta", most=1)
    trained(folders, tmp_path, callback, lr_scheduler_type="linear")
    (made,) = (tmp_path / "up").iterdir()
    training = load_bundle(made).manifest.knowledge["training"]
    assert (training and training["schedule"]) == told


def test_what_was_recorded_is_read(folders, tmp_path):
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    made = load_model(ModelSpec(f"random:{folders['bert']}"))
    model = AutoModelForSequenceClassification.from_config(made.module.config.__class__(
        **made.module.config.to_dict() | rates))  # fmt: skip
    model.load_state_dict(made.module.state_dict())
    rows = [{"labels": n % 2, **made.tokenizer(text)} for n, text in enumerate(TEXTS[:2])]
    arguments = TrainingArguments(output_dir=str(tmp_path / "t"), max_steps=1, per_device_train_batch_size=2,
                                  report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True)  # fmt: skip
    callback = AuditCallback(tmp_path / "up")
    Trainer(model, arguments, train_dataset=rows, processing_class=made.tokenizer, callbacks=[callback]).train()
    found = examine(tmp_path / "up" / "step-1", None, [], "all", None, 0, torch.device("cpu"))
    assert sorted(found.texts) == sorted(TEXTS[:2])


@pytest.mark.parametrize("fault", ["no tokenizer", "no room", "a bug"])
def test_no_training_breaks_and_what_went_wrong_is_logged(folders, tmp_path, caplog, monkeypatch, fault):
    folder = tmp_path / "up"
    if fault == "no room":
        folder.write_text("in the way")
    if fault == "a bug":
        monkeypatch.setattr("gradaudit.bundles.capture.save_bundle", lambda *_, **__: 1 / 0)
    with caplog.at_level(logging.WARNING, "gradaudit"):
        module, before = trained(folders, tmp_path, AuditCallback(folder, every=3), tokenizer=fault != "no tokenizer")
    assert not torch.equal(module.classifier.weight, before["classifier.weight"]), "it was trained"
    told = {"no tokenizer": "needs its tokenizer", "no room": "cannot write", "a bug": "division by zero"}[fault]
    assert told in caplog.text
    assert "step 1" in caplog.text or "step-1" in caplog.text
    assert not module._forward_pre_hooks
    assert module.training
    assert fault == "no room" or not list(folder.iterdir()), "nothing half written is left"


def test_several_processes_are_refused_and_the_training_goes_on(tmp_path, caplog, monkeypatch, load):
    callback = AuditCallback(tmp_path / "up")
    callback.on_train_begin(SimpleNamespace(world_size=2, n_gpu=1), None, None)
    assert "one process" in caplog.text
    callback.on_step_begin(None, SimpleNamespace(global_step=0), None)
    assert not (tmp_path / "up").exists()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = load("bert")
    with (
        pytest.raises(NotSupportedError, match="one of 2"),
        gradaudit.capture(model.module, tmp_path / "up", tokenizer=model.tokenizer),
    ):
        raise AssertionError("training began")


def test_a_loop_of_accelerate_in_one_process_is_captured(folders, tmp_path):
    from accelerate import Accelerator

    made = load_model(ModelSpec(f"random:{folders['bert']}"))
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(made.module, torch.optim.SGD(made.module.parameters(), lr=0.1))
    batch = made.tokenizer(TEXTS[:2], return_tensors="pt")
    with gradaudit.capture(model, tmp_path / "up", tokenizer=made.tokenizer):
        accelerator.backward(model(input_ids=batch["input_ids"], labels=torch.tensor([0, 1])).loss)
        optimizer.step()
    assert load_bundle(tmp_path / "up").manifest.knowledge["batch_size"] == 2


@pytest.mark.parametrize("how", [{"every": 0}, {"most": 0}, {"what": "weights"}])
def test_what_cannot_be_is_said_at_once(tmp_path, how):
    with pytest.raises(BadInputError, match="AuditCallback takes"):
        AuditCallback(tmp_path, **how)
