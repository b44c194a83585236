"""`gradaudit bundle`: from two checkpoints of any kind to the update between them, and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import gradaudit as package
from gradaudit.bundles.bundle import load_bundle
from gradaudit.bundles.examine import examine
from gradaudit.errors import AuditError, BadInputError
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.types import LocalTraining
from tiny_models import NEWER, sentences

TEXTS = sentences([5, 4], seed=3)
STEP = ("--optimizer", "adamw", "--learning-rate", "1e-4")


def trained(folders, family: str = "bert", task: str = "classification", optimizer: Any = None) -> tuple[Any, Any, Any]:
    """A stock model, its tokenizer, and a function that takes one step, of AdamW in training mode by default."""
    torch.manual_seed(1)
    made = load_model(ModelSpec(f"random:{folders[family]}", task))
    module = made.module.train(optimizer is None)
    stepper = optimizer(module.parameters(), lr=0.1) if optimizer else torch.optim.AdamW(module.parameters(), lr=1e-4)
    batch = made.tokenizer(TEXTS, padding=True, return_tensors="pt")
    labels = torch.tensor([1, 0]) if task == "classification" else batch["input_ids"]

    def step() -> None:
        module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        stepper.step()

    return module, made.tokenizer, step


def two(folders, where: Path, **how: Any) -> tuple[Path, Path, Any]:
    """Two folders of save_pretrained around one step, and the model behind it."""
    module, tokenizer, step = trained(folders, **how)
    module.save_pretrained(where / "A")
    tokenizer.save_pretrained(where / "A")
    step()
    module.save_pretrained(where / "B")
    return where / "A", where / "B", module


def test_two_folders_give_exact_sentences_with_two_commands(folders, tmp_path, gradaudit):
    before, after, _ = two(folders, tmp_path, optimizer=torch.optim.SGD)
    told = ("--dropout", "off", "--optimizer", "sgd", "--learning-rate", "0.1", "--sentences", "2")
    code, out, err = gradaudit("bundle", tmp_path / "up", "--before", before, "--after", after, *told)
    assert code == 0, err
    assert out.strip() == f"gradaudit attack {tmp_path / 'up'}"
    code, out, err = gradaudit("attack", tmp_path / "up", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["attack"], found["by"]) == ("auto", "decode")
    assert sorted(found["texts"]) == sorted(TEXTS)


@pytest.mark.parametrize("family", [f for f in NEWER if f != "qwen2"])  # see test_models.py
def test_two_folders_of_other_families_give_exact_sentences(folders, tmp_path, gradaudit, family):
    before, after, _ = two(folders, tmp_path, family=family, optimizer=torch.optim.SGD)
    told = ("--dropout", "off", "--optimizer", "sgd", "--learning-rate", "0.1", "--sentences", "2")
    code, _, err = gradaudit("bundle", tmp_path / "up", "--before", before, "--after", after, *told)
    assert code == 0, err
    code, out, err = gradaudit("attack", tmp_path / "up", "--json")
    assert code == 0, err
    words = AutoTokenizer.from_pretrained(before)
    assert sorted(json.loads(out)["ids"]) == sorted(words(text)["input_ids"] for text in TEXTS)


def test_code_that_a_configuration_names_is_left_out_of_the_bundle(folders, tmp_path, gradaudit):
    """Published Phi models name their first code so, though transformers has its own by now."""
    before, after, _ = two(folders, tmp_path, family="phi3", optimizer=torch.optim.SGD)
    for folder in (before, after):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "someone.Config"}}))
    code, _, err = gradaudit("bundle", tmp_path / "up", "--before", before, "--after", after)
    assert code == 0, err
    assert load_bundle(tmp_path / "up").tensors


def test_it_is_what_capture_writes_of_the_same_step(folders, tmp_path, gradaudit):
    module, tokenizer, step = trained(folders)
    module.save_pretrained(tmp_path / "A")
    tokenizer.save_pretrained(tmp_path / "A")
    how = LocalTraining("adamw", 1e-4, weight_decay=0.01)
    with package.capture(module, tmp_path / "one", tokenizer=tokenizer, what="delta", training=how, sentences=2):
        step()
    module.save_pretrained(tmp_path / "B")
    told = (*STEP, "--set", "weight_decay=0.01", "--sentences", "2", "--dropout", "on", "--defense", "none")
    code, _, err = gradaudit("bundle", tmp_path / "up", "--before", tmp_path / "A", "--after", tmp_path / "B", *told)
    assert code == 0, err
    one, other = (load_bundle(tmp_path / name) for name in ("one", "up"))
    assert one.manifest.model.fingerprint == other.manifest.model.fingerprint
    assert one.manifest.knowledge | {"defenses": []} == other.manifest.knowledge
    assert {name: value for name, value in one.tensors.items() if value.any()}.keys() == other.tensors.keys()
    assert all(torch.equal(one.tensors[name], value) for name, value in other.tensors.items())


def test_the_update_is_after_minus_before_and_what_is_not_told_is_unknown(folders, tmp_path, gradaudit):
    before, after, _ = two(folders, tmp_path)
    code, _, err = gradaudit("bundle", tmp_path / "up", "--before", before, "--after", after)
    assert code == 0, err
    assert "not told: optimizer and learning rate, sentences, dropout" in err
    for told, said in (("0", "and 0 was told"), ("0.01", None)):
        more = ("--before", before, "--after", after, *STEP, "--set", f"weight_decay={told}")
        code, _, err = gradaudit("bundle", tmp_path / "told", *more)
        assert code == 0, err
        assert said in err if said else "weight decay" not in err
    bundle = load_bundle(tmp_path / "up")
    known = bundle.manifest.knowledge
    assert [known[k] for k in ("dropout", "training", "batch_size", "defenses")] == [None] * 4
    a, b = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert bundle.manifest.kind == "delta"
    assert bundle.tensors
    for name, value in bundle.tensors.items():
        assert torch.equal(value, b[name] - a[name])
    assert all(torch.equal(p, a[name]) for name, p in bundle.model.parameters().items())
    assert all(torch.equal(a[name], b[name]) for name in set(a) - set(bundle.tensors)), "left out: it did not change"


@pytest.mark.parametrize(
    ("said", "rate"), [("on", pytest.approx(0.1)), ("off", 0.0), ("0.25", 0.25)], ids=["on", "off", "rate"]
)
def test_dropout_is_what_was_said(folders, tmp_path, gradaudit, said, rate):
    before, after, _ = two(folders, tmp_path)
    where = ("bundle", tmp_path / "up", "--before", before, "--after", after)
    code, _, err = gradaudit(*where, "--dropout", said, "--defense", '{name="gaussian",sigma=1e-4}')
    assert code == 0, err
    known = load_bundle(tmp_path / "up").manifest.knowledge
    assert known["dropout"] == rate
    assert known["defenses"] == [{"name": "gaussian", "sigma": 1e-4}]


def as_file(kind: str, module: Any, path: Path) -> Any:
    """The state of a model in one of the forms that are taken."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    arrays = [value.numpy() for value in state.values()]
    if kind == "safetensors":
        module.save_pretrained(path)
        return path / "model.safetensors"
    if kind == "npz":  # as Flower's users save what parameters_to_ndarrays gives
        np.savez(path.with_suffix(".npz"), *arrays)
        return path.with_suffix(".npz")
    if kind == "named npz":
        np.savez(path.with_suffix(".npz"), **{name: value.numpy() for name, value in state.items()})
        return path.with_suffix(".npz")
    if kind in ("pt", "wrapped pt"):
        wrapped = {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in state.items()}}
        torch.save(state if kind == "pt" else wrapped, path.with_suffix(".pt"))
        return path.with_suffix(".pt")
    return {"arrays": arrays, "mapping": state}[kind]


@pytest.mark.parametrize("kind", ["safetensors", "npz", "named npz", "pt", "wrapped pt", "arrays", "mapping"])
def test_every_form_of_weights_gives_the_same_update(folders, tmp_path, kind):
    module, tokenizer, step = trained(folders, "gpt2", "causal-lm")  # its head is tied to the words
    module.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    before = as_file(kind, module, tmp_path / "before")
    step()
    after = as_file(kind, module, tmp_path / "after")
    module.save_pretrained(tmp_path / "after-folder")
    package.bundle(before, after, out=tmp_path / "up", base=tmp_path / "base")
    package.bundle(tmp_path / "base", tmp_path / "after-folder", out=tmp_path / "plain")
    one, other = (load_bundle(tmp_path / name) for name in ("up", "plain"))
    assert one.manifest.sha256 == other.manifest.sha256
    assert one.manifest.model.fingerprint == other.manifest.model.fingerprint
    assert one.manifest.model.task == "causal-lm"


def test_a_model_itself_may_stand_for_its_folder_and_is_left_as_it_was(folders, tmp_path):
    module, tokenizer, step = trained(folders)
    before = as_file("arrays", module, tmp_path)
    step()
    modes = [part.training for part in module.modules()]
    now = {name: value.clone() for name, value in module.state_dict().items()}
    package.bundle(
        before, as_file("arrays", module, tmp_path), out=tmp_path / "up", base=module, tokenizer=tokenizer,
        training=LocalTraining("adamw", 1e-4, weight_decay=0.01), sentences=2, dropout=True, defenses=(),
    )  # fmt: skip
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(value, now[name]) for name, value in module.state_dict().items())
    known = load_bundle(tmp_path / "up").manifest.knowledge
    assert (known["batch_size"], known["dropout"], known["defenses"]) == (2, pytest.approx(0.1), [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shards_and_half_precision_are_read(folders, tmp_path, gradaudit, dtype):
    module, tokenizer, step = trained(folders)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(p.to(dtype))
    for name in ("A", "B"):
        module.to(dtype).save_pretrained(tmp_path / name, max_shard_size="20KB")
        tokenizer.save_pretrained(tmp_path / name)
        module.float()
        step()
    assert len(list((tmp_path / "A").glob("*.safetensors"))) > 2
    where = ("--before", tmp_path / "A", "--after", tmp_path / "B")
    code, _, err = gradaudit("bundle", tmp_path / "up", *where)
    assert code == 0, err
    assert ("bfloat16" in err) == (dtype == torch.bfloat16)
    bundle = load_bundle(tmp_path / "up")
    assert all(p.dtype == torch.float32 for p in bundle.model.parameters().values())


def test_adapters_and_their_base_make_a_bundle_that_is_read(folders, tmp_path, gradaudit):
    module, tokenizer, _ = trained(folders, "llama")
    module.base_model.save_pretrained(tmp_path / "base")  # the head is in the adapter alone, and of three classes
    tokenizer.save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    base.config.pad_token_id = tokenizer.pad_token_id
    how = peft.LoraConfig(task_type="SEQ_CLS", r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(base, how).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(0.1 * torch.randn(value.shape))
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    model.save_pretrained(tmp_path / "A")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = torch.tensor([2, 0])
    model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "B")
    where = ("bundle", tmp_path / "up", "--before", tmp_path / "A", "--after", tmp_path / "B")
    code, _, err = gradaudit(*where)
    assert code == 2
    assert "--base MODEL" in err
    told = ("--dropout", "off", "--optimizer", "sgd", "--learning-rate", "0.1", "--sentences", "2")
    code, _, err = gradaudit(*where, "--base", tmp_path / "base", *told)
    assert code == 0, err
    bundle = load_bundle(tmp_path / "up")
    assert bundle.manifest.model.adapters
    assert bundle.model.spec.labels == 3
    with torch.no_grad():
        theirs = bundle.model.logits(ids=batch["input_ids"], mask=batch["attention_mask"])
        model.load_adapter(tmp_path / "A", "first")
        model.set_adapter("first")
        ours = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    code, out, err = gradaudit("attack", tmp_path / "up", "--attack", "decode", "--json")
    assert code == 0, err
    words = {word["text"] for word in json.loads(out)["words"]}
    assert words == {word for text in TEXTS for word in text.split()}


@pytest.mark.parametrize("form", ["sent by name", "in order", "whole state"])
def test_a_federation_of_adapters_is_recorded_by_what_it_sends(folders, tmp_path, form):
    module, tokenizer, _ = trained(folders, "llama")
    how = peft.LoraConfig(task_type="SEQ_CLS", r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(module, how).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(0.1 * torch.randn(value.shape))

    def sent() -> Any:
        state = model.state_dict() if form == "whole state" else peft.get_peft_model_state_dict(model)
        arrays = {name: value.numpy().copy() for name, value in state.items()}
        return list(arrays.values()) if form == "in order" else arrays

    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    before = sent()
    ids, labels = batch["input_ids"], torch.tensor([1, 0])
    told = LocalTraining("sgd", 0.1)
    with package.capture(model, tmp_path / "one", tokenizer=tokenizer, what="delta", training=told, sentences=2):
        model(input_ids=ids, attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    package.bundle(before, sent(), out=tmp_path / "up", base=model, tokenizer=tokenizer, training=told, sentences=2,
                   dropout=False)  # fmt: skip
    one, other = (load_bundle(tmp_path / name) for name in ("one", "up"))
    assert one.manifest.model.fingerprint == other.manifest.model.fingerprint
    assert {name for name, value in one.tensors.items() if value.any()} == set(other.tensors)
    assert all(torch.equal(one.tensors[name], value) for name, value in other.tensors.items())
    found = examine(tmp_path / "up", "decode", [], "all", None, 0, torch.device("cpu"))
    assert {word.text for word in found.words or ()} == {word for text in TEXTS for word in text.split()}
    with pytest.raises(BadInputError, match=r"given in order|does not have"):
        package.bundle(before, {"strange": np.zeros(3)} if form != "in order" else [np.zeros(3)], out=tmp_path / "no",
                       base=model, tokenizer=tokenizer)  # fmt: skip


def test_attack_on_checkpoints_says_the_command(folders, tmp_path, gradaudit):
    before, after, _ = two(folders, tmp_path)
    for given, wanted in (((before, after), after), ((before,), "OTHER")):
        code, _, err = gradaudit("attack", *given)
        assert code == 2
        assert f"gradaudit bundle OUT --before {before} --after {wanted}" in err


class Code:
    """What unpickles to a call."""

    def __reduce__(self) -> Any:
        return (eval, ("open('/tmp/gradaudit-was-here', 'w')",))


def spoiled(fault: str, folders, where: Path) -> tuple[list[Any], str]:
    """Arguments of `bundle` with one mistake in them, and a part of the sentence that names it."""
    before, after, module = two(folders, where)
    weights = load_file(after / "model.safetensors")
    base = ["--base", before]
    first = "bert.encoder.layer.0.attention.self.query.weight"
    match fault:
        case "code":
            (where / "x.pt").write_bytes(pickle.dumps({"w": Code()}))
            torch.save({"w": Code()}, where / "y.pt")
            return [before, where / "y.pt"], "pickled code"
        case "old pickle":
            (where / "x.pt").write_bytes(pickle.dumps({"w": Code()}))
            return [before, where / "x.pt"], "no file of torch 1.6 or later"
        case "objects":
            np.savez(where / "x.npz", np.array([Code()], dtype=object))
            return [before, where / "x.npz"], "arrays"
        case "the moon":  # a header alone
            np.savez(where / "x.npz", **{first: np.zeros((2**40, 0), dtype=np.float32)})
            return [before, where / "x.npz"], "is of another model"
        case "another shape":
            save_file(weights | {first: weights[first][:-1].clone()}, after / "model.safetensors", {"format": "pt"})
            return [before, after], "other shapes"
        case "missing":
            save_file({k: v for k, v in weights.items() if k != first}, after / "model.safetensors", {"format": "pt"})
            return [before, after], first
        case "another family":
            other, tokenizer, _ = trained(folders, "gpt2")
            other.save_pretrained(where / "C")
            return [before, where / "C"], "is of another model"
        case "other weights":
            torch.manual_seed(9)
            AutoModelForSequenceClassification.from_config(module.config).save_pretrained(where / "C")
            return [before, where / "C"], "not those before, trained on"
        case "a change":
            a = load_file(before / "model.safetensors")
            save_file({k: v - a[k] for k, v in weights.items()}, where / "x.safetensors")
            return [before, where / "x.safetensors"], "a change was given"
        case "weights for a change":
            save_file({k: 2 * v for k, v in load_file(before / "model.safetensors").items()}, where / "x.safetensors")
            return [before, where / "x.safetensors"], "weights were given where a change was expected"
        case "nothing changed":
            return [before, before], "are the same"
        case "no number":
            weights[first][0, 0] = float("nan")
            save_file(weights, after / "model.safetensors", {"format": "pt"})
            return [before, after], "NaN or infinite"
        case "infinite":
            save_file(weights | {first: weights[first] / 0}, after / "model.safetensors", {"format": "pt"})
            return [before, after], "NaN or infinite"
        case "no tokenizer":
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (before / name).unlink()
            return [before, after], "--tokenizer"
        case "no model":
            save_file(weights, where / "x.safetensors")
            return [where / "x.safetensors", where / "x.safetensors", "--tokenizer", before], "--base MODEL"
        case "too few":
            np.savez(where / "x.npz", *[v.numpy() for v in weights.values()][:-1])
            return [before, where / "x.npz"], "arrays were given in order"
        case "untied":
            tied, tokenizer, _ = trained(folders, "gpt2", "causal-lm")
            tied.save_pretrained(where / "T")
            tokenizer.save_pretrained(where / "T")
            state = dict(tied.state_dict())
            torch.save(state | {"lm_head.weight": state["lm_head.weight"] + 1}, where / "x.pt")
            return [where / "T", where / "x.pt"], "tied"
        case "pickle folder":
            (after / "model.safetensors").unlink()
            torch.save(weights, after / "pytorch_model.bin")
            return [before, after], f"give {after / 'pytorch_model.bin'}"
        case "none there":
            return [before, where / "none"], "no such checkpoint"
        case "dropout":
            return [before, after, "--dropout", "maybe"], "on, off or a rate"
        case "a dropout of one":
            return [before, after, "--dropout", "1"], "dropout must be"
        case "half a training":
            return [before, after, "--optimizer", "sgd"], "--optimizer and --learning-rate"
        case "a training":
            return [before, after, "--optimizer", "sdg", "--learning-rate", "1"], "optimizer"
        case "a field":
            return [before, after, *STEP, "--set", "epoch=2"], "did you mean 'epochs'"
        case "a defense":
            return [before, after, "--defense", "sing"], "did you mean 'sign'"
        case _:
            raise AssertionError(fault, base)


@pytest.mark.parametrize(
    "fault",
    ["code", "old pickle", "objects", "the moon", "another shape", "missing", "another family", "other weights",
     "a change", "weights for a change", "nothing changed",
     "infinite", "no number", "no tokenizer", "no model", "too few", "untied", "pickle folder",
     "none there", "dropout", "a dropout of one", "half a training", "a training", "a field", "a defense"],
)  # fmt: skip
def test_a_mistake_gets_one_sentence_and_nothing_is_written(folders, tmp_path, gradaudit, capsys, fault):
    (before, after, *more), told = spoiled(fault, folders, tmp_path)
    capsys.readouterr()
    there = sorted(path.name for path in tmp_path.iterdir())
    code, out, err = gradaudit("bundle", tmp_path / "up", "--before", before, "--after", after, *more)
    assert code == 2, (out, err)
    assert told in err
    assert len(err.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == there
    assert not Path("/tmp/gradaudit-was-here").exists()


def test_a_base_may_be_a_hub_id_and_one_that_is_not_to_be_had_is_named(folders, tmp_path, monkeypatch):
    before, after, _ = two(folders, tmp_path)

    def fetched(name: str, **_: Any) -> str:
        if name != "owner/name":
            raise OSError("404 Client Error")
        return str(before)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    weights = [folder / "model.safetensors" for folder in (before, after)]
    package.bundle(*weights, out=tmp_path / "up", base="owner/name")
    assert load_bundle(tmp_path / "up").tensors
    with pytest.raises(BadInputError, match=r"'owner/nmae' is no folder, .*404"):
        package.bundle(*weights, out=tmp_path / "no", base="owner/nmae")


def test_noise_far_above_the_weights_is_no_other_model(folders, tmp_path):
    module, tokenizer, _ = trained(folders)
    rng = np.random.default_rng(0)
    before = as_file("arrays", module, tmp_path)
    after = [value + rng.normal(0, 5, value.shape).astype(np.float32) for value in before]
    package.bundle(before, after, out=tmp_path / "up", base=module, tokenizer=tokenizer)
    assert load_bundle(tmp_path / "up").tensors


def test_a_folder_that_is_no_bundle_is_not_replaced(folders, tmp_path):
    before, after, _ = two(folders, tmp_path)
    with pytest.raises(BadInputError, match="no bundle"):
        package.bundle(before, after, out=before)
    assert (before / "model.safetensors").exists()
    for sentences_ in (1, 2):
        package.bundle(before, after, out=tmp_path / "up", sentences=sentences_)
    assert load_bundle(tmp_path / "up").manifest.knowledge["batch_size"] == 2


@pytest.mark.parametrize("fault", ["one adapter", "another rank", "another base"])
def test_adapters_that_do_not_belong_together_are_refused(folders, tmp_path, fault):
    module, tokenizer, _ = trained(folders, "llama", "causal-lm")
    module.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for name, rank in (("A", 2), ("B", 3 if fault == "another rank" else 2)):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        how = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=["q_proj"])
        peft.get_peft_model(base, how).save_pretrained(tmp_path / name)
    base_of, after = tmp_path / "base", tmp_path / "B"
    if fault == "one adapter":
        after = tmp_path / "base"
    if fault == "another base":
        other, words, _ = trained(folders, "gpt2", "causal-lm")
        other.save_pretrained(tmp_path / "other")
        words.save_pretrained(tmp_path / "other")
        base_of = tmp_path / "other"
    with pytest.raises(AuditError, match={"one adapter": "two adapter folders", "another rank": "different adapters",
                                          "another base": "another base model"}[fault]):  # fmt: skip
        package.bundle(tmp_path / "A", after, out=tmp_path / "up", base=base_of)
    assert not (tmp_path / "up").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "base") is not None


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadInputError, match="no file or folder"):
        package.bundle(tmp_path / "nowhere", tmp_path / "B", out=tmp_path / "up")
