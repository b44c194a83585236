"""A stock peft model: captured, attacked, and what of adapters is refused."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
)

from gradaudit.bundles.bundle import load_bundle
from gradaudit.bundles.capture import capture
from gradaudit.bundles.examine import examine
from gradaudit.errors import AuditError, BadInputError, NotSupportedError
from gradaudit.models.spec import Lora, ModelSpec
from gradaudit.models.zoo import load_model, whole_shapes
from gradaudit.types import LocalTraining
from tiny_models import sentences

EXAMPLE = Path(__file__).parent.parent / "examples" / "audit_my_lora.py"
TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "bert": ["query", "value"]}
CPU = torch.device("cpu")


def peft_model(folder: Path, family: str, **how: Any) -> tuple[Any, Any]:
    """A model as peft makes it, with B as after some steps, and its tokenizer; dropout off."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config.pad_token_id = tokenizer.pad_token_id
    base = AutoModelForSequenceClassification.from_config(config)
    told = {"task_type": "SEQ_CLS", "r": 3, "lora_alpha": 6, "target_modules": TARGETS[family]} | how
    model = peft.get_peft_model(base, peft.LoraConfig(**told))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(0.1 * torch.randn(value.shape))
    return model.eval(), tokenizer


def step(model: Any, tokenizer: Any, texts: list[str], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        labels=torch.arange(len(texts)) % 2,
    ).loss.backward()
    optimizer.step()


def words_of(texts: list[str]) -> set[str]:
    return {word for text in texts for word in text.split()}


@pytest.mark.parametrize("what", ["gradient", "delta"])
@pytest.mark.parametrize("integrated", [False, True])
def test_a_stock_peft_model_is_captured_and_its_words_are_read(folders, tmp_path, what, integrated):
    model, tokenizer = peft_model(folders["llama"], "llama")
    if integrated:  # transformers' own
        model = AutoModelForSequenceClassification.from_config(model.get_base_model().config)
        model.add_adapter(peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS["llama"]))
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_B" in name:
                    value.copy_(0.1 * torch.randn(value.shape))
        model.eval()
    texts = sentences([5, 4], 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    how = LocalTraining("sgd", 0.1) if what == "delta" else None
    with capture(model, tmp_path / "up", tokenizer=tokenizer, what=what, training=how, sentences=2):
        step(model, tokenizer, texts, optimizer)
    assert not model.training or integrated
    found = examine(tmp_path / "up", "decode", [], "all", None, 0, CPU)
    assert {word.text for word in found.words or ()} == words_of(texts)
    assert found.as_json()["words"][0].keys() == {"text", "id", "steps", "certain"}
    bundle = load_bundle(tmp_path / "up")
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    theirs = next(value for key, value in before.items() if key.endswith(name))
    assert torch.equal(bundle.model.parameters()[name].detach(), theirs)


@pytest.mark.parametrize(("family", "how"), [("llama", {"use_rslora": True}), ("gpt2", {}), ("bert", {})])
def test_the_model_in_the_bundle_computes_what_peft_s_does(folders, tmp_path, family, how):
    """Oracle: peft's own forward pass, with ranks and scales that differ between matrices."""
    uneven = {"rank_pattern": {"layers.1.self_attn.v_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 9}}
    model, tokenizer = peft_model(folders[family], family, **how, **(uneven if family == "llama" else {}))
    texts = sentences([4, 4], 2)
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        wanted = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    with capture(model, tmp_path / "up", tokenizer=tokenizer):
        step(model, tokenizer, texts, torch.optim.SGD(model.parameters(), lr=0.1))
    loaded = load_bundle(tmp_path / "up").model
    with torch.no_grad():
        got = loaded.logits(ids=batch["input_ids"], mask=batch["attention_mask"])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_base_is_captured_as_the_numbers_it_stands_for(folders, tmp_path, bits):
    """QLoRA. Oracles: the packed model's own pass; of eight bits, whose pass rounds more, numbers and scales too."""
    config = AutoConfig.from_pretrained(folders["llama"], num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
    config.pad_token_id = tokenizer.pad_token_id
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "base")
    how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} if bits == 4 else {"load_in_8bit": True}
    packed = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", quantization_config=BitsAndBytesConfig(**how)
    )
    kept = packed.hf_quantizer, packed.config.quantization_config
    base = peft.prepare_model_for_kbit_training(packed, use_gradient_checkpointing=False)
    model = peft.get_peft_model(
        base, peft.LoraConfig(task_type="SEQ_CLS", r=3, target_modules=TARGETS["llama"], init_lora_weights=False)
    )
    # as a Trainer sets it: bitsandbytes repacks a base in eval mode for fast inference on a CPU
    model.train()
    texts = sentences([5, 4], 1)
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        wanted = model(**batch).logits
    with capture(model, tmp_path / "up", tokenizer=tokenizer):
        step(model, tokenizer, texts, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0))
    assert (packed.hf_quantizer, packed.config.quantization_config) == kept
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, wanted)
    loaded = load_bundle(tmp_path / "up").model
    with torch.no_grad():
        got = loaded.logits(ids=batch["input_ids"], mask=batch["attention_mask"])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 if bits == 4 else 0.02)
    if bits == 8:
        part = packed.model.layers[1].mlp.up_proj
        by_hand = part.weight.data.float() * part.state.SCB.reshape(-1, 1) / 127
        torch.testing.assert_close(loaded.parameters()["model.layers.1.mlp.up_proj.weight"].detach(), by_hand)
    found = examine(tmp_path / "up", "decode", [], "0:q,k,v", None, 0, CPU)
    assert {word.text for word in found.words or () if word.certain} == words_of(texts)
    packed.quantization_method = "gptq"
    with pytest.raises(NotSupportedError, match="not by gptq"), capture(model, tmp_path / "no", tokenizer=tokenizer):
        raise AssertionError("training began")


def test_modes_are_left_as_they_were_and_the_wrapper_s_own_says_nothing_of_dropout(folders, tmp_path):
    model, tokenizer = peft_model(folders["bert"], "bert")
    model.training = True  # peft's wrapper says so whatever is in it
    modes = [part.training for part in model.modules()]
    with capture(model, tmp_path / "up", tokenizer=tokenizer):
        step(model, tokenizer, sentences([4], 1), torch.optim.SGD(model.parameters(), lr=0.1))
    assert [part.training for part in model.modules()] == modes
    assert load_bundle(tmp_path / "up").manifest.knowledge["dropout"] == 0.0


@pytest.mark.parametrize(
    ("how", "told"), [({"use_dora": True}, "LoRA adapters, not"), ({"bias": "lora_only"}, "LoRA adapters, not")]
)
def test_other_adapters_are_refused_before_training(folders, tmp_path, how, told):
    model, tokenizer = peft_model(folders["llama"], "llama", **how)
    with pytest.raises(NotSupportedError, match=told), capture(model, tmp_path / "up", tokenizer=tokenizer):
        raise AssertionError("training began")
    assert not (tmp_path / "up").exists()


def test_merged_adapters_are_refused_and_of_several_the_active_one_counts(folders, tmp_path):
    model, tokenizer = peft_model(folders["llama"], "llama")
    model.add_adapter("second", peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"]))
    model.set_adapter("second")
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B.second" in name:
                value.copy_(0.1 * torch.randn(value.shape))
    with capture(model, tmp_path / "up", tokenizer=tokenizer):
        step(model, tokenizer, sentences([2], 1), torch.optim.SGD(model.parameters(), lr=0.1))
    held = load_file(tmp_path / "up" / "update.safetensors")
    assert {name for name in held if ".v_proj." in name} == set()
    assert held["model.layers.0.self_attn.q_proj.lora_A.default.weight"].shape[0] == 2
    model.merge_adapter()
    with (
        pytest.raises(NotSupportedError, match="unmerge_adapter"),
        capture(model, tmp_path / "merged", tokenizer=tokenizer),
    ):
        pass


def test_an_adapter_that_was_trained_elsewhere_is_the_state_of_an_audit(folders, tmp_path):
    model, _ = peft_model(folders["llama"], "llama")
    model.save_pretrained(tmp_path / "adapter")
    loaded = load_model(ModelSpec(f"random:{folders['llama']}", lora=Lora(folder=str(tmp_path / "adapter"))))
    name = "layers.2.self_attn.v_proj.lora_B.default.weight"
    theirs = next(value for key, value in model.state_dict().items() if key.endswith(name))
    ours = next(value for key, value in loaded.parameters().items() if key.endswith(name))
    assert torch.equal(ours.detach(), theirs)


@pytest.mark.parametrize(
    "fault",
    [
        "no config",
        "another base",
        "a rank without numbers",
        "a shape",
        "half",
        "dora",
        "an expression",
        "not json",
        "cut",
    ],
)
def test_a_damaged_or_foreign_adapter_ends_in_one_sentence(folders, tmp_path, fault):
    model, _ = peft_model(folders["llama"], "llama")
    folder = tmp_path / "adapter"
    model.save_pretrained(folder)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    told = json.loads(config.read_text())
    if fault == "no config":
        config.unlink()
    elif fault == "another base":
        save_file({k.replace("q_proj", "query"): v for k, v in load_file(weights).items()}, weights)
    elif fault == "a shape":
        save_file({k: v[:, :-1].clone() if "lora_A" in k else v for k, v in load_file(weights).items()}, weights)
    elif fault == "a rank without numbers":
        # a header of a few bytes may ask for any rank, where the other side is empty
        held = load_file(weights)
        name = next(key for key in held if "q_proj.lora_A" in key)
        save_file(held | {name: torch.zeros(2**40, 0), name.replace("_A", "_B"): torch.zeros(0, 2**40)}, weights)
    elif fault == "half":
        save_file({k: v for k, v in load_file(weights).items() if "1.self_attn.q_proj.lora_B" not in k}, weights)
    elif fault == "dora":
        config.write_text(json.dumps(told | {"use_dora": True}))
    elif fault == "an expression":
        config.write_text(json.dumps(told | {"alpha_pattern": {"(a+)+$": 3}}))
    elif fault == "not json":
        config.write_text("{")
    else:
        weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(AuditError) as error:
        load_model(ModelSpec(f"random:{folders['llama']}", lora=Lora(folder=str(folder))))
    assert "\n" not in str(error.value)
    assert isinstance(error.value, BadInputError | NotSupportedError)


def test_a_bundle_whose_adapter_was_exchanged_is_not_attacked(folders, tmp_path):
    model, tokenizer = peft_model(folders["llama"], "llama")
    with capture(model, tmp_path / "up", tokenizer=tokenizer):
        step(model, tokenizer, sentences([3], 1), torch.optim.SGD(model.parameters(), lr=0.1))
    weights = tmp_path / "up" / "model" / "adapter" / "adapter_model.safetensors"
    save_file({name: 2 * value for name, value in load_file(weights).items()}, weights)
    with pytest.raises(BadInputError, match="names another model"):
        load_bundle(tmp_path / "up")
    shutil.rmtree(weights.parent)
    with pytest.raises(AuditError):
        load_bundle(tmp_path / "up")


def test_the_example_reads_every_word_of_its_messages_behind_an_adamw_step(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["audit_my_lora.py", "--out", str(tmp_path / "up")])
    example = runpy.run_path(str(EXAMPLE))
    found = example["main"]()
    assert found.knowledge.training.optimizer == "adamw"
    named = {word.text for word in found.words if word.certain}
    asked = {word for text in example["MESSAGES"] for word in text.lower().replace(".", " .").split()}
    assert named == asked


def test_words_alone_are_an_answer_of_the_program_and_are_shown(folders, tmp_path, gradaudit):
    model, tokenizer = peft_model(folders["llama"], "llama")
    texts = sentences([5, 4], 1)
    with capture(model, tmp_path / "up", tokenizer=tokenizer):
        step(model, tokenizer, texts, torch.optim.SGD(model.parameters(), lr=0.1))
    told = ("--attack", "decode", "--selection", "0:q,k,v")  # block 0 tells words alone
    code, out, err = gradaudit("attack", tmp_path / "up", *told)
    assert code == 0, err
    assert "0 sentences" in out
    assert "9 words, 9 of them for certain" in out
    assert all(word in out for word in words_of(texts))
    code, out, _ = gradaudit("attack", tmp_path / "up", tmp_path / "up", *told)
    assert code == 0
    assert out.count("9 words, 9 of them for certain") == 2


def test_a_bundle_that_takes_another_s_place_has_none_of_its_adapters(folders, tmp_path):
    model, tokenizer = peft_model(folders["llama"], "llama")
    plain = AutoModelForSequenceClassification.from_config(model.get_base_model().config)
    for one in (model, plain):
        with capture(one, tmp_path / "up", tokenizer=tokenizer):
            step(one, tokenizer, sentences([3], 1), torch.optim.SGD(one.parameters(), lr=0.1))
    assert load_bundle(tmp_path / "up").model.spec.lora is None


def test_a_decoder_of_next_words_with_tied_embeddings_is_captured_with_its_adapters(folders, tmp_path):
    config = AutoConfig.from_pretrained(folders["llama"], tie_word_embeddings=True)
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=TARGETS["llama"]))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(0.1 * torch.randn(value.shape))
    texts = sentences([5, 4], 1)
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with capture(model.eval(), tmp_path / "up", tokenizer=tokenizer):
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    found = examine(tmp_path / "up", "decode", [], "all", None, 0, CPU)
    last = {text.split()[-1] for text in texts}
    assert words_of(texts) - last <= {word.text for word in found.words or ()} <= words_of(texts)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_adapters_of_the_first_blocks_alone_are_read(folders, tmp_path, family):
    model, tokenizer = peft_model(folders[family], family)
    texts = sentences([5, 4], 1)
    with capture(model, tmp_path / "up", tokenizer=tokenizer, sentences=2):
        step(model, tokenizer, texts, torch.optim.SGD(model.parameters(), lr=0.1))
    whole = load_bundle(tmp_path / "up")
    part = load_bundle(tmp_path / "up", blocks=2)
    assert part.model.depth == whole.model.depth == 3
    here = part.model.parameters()
    assert {name for name in whole.tensors if name in here} == set(part.tensors)
    assert any(".1." in name and ".lora_A." in name for name in part.tensors)
    assert not any(".2." in name and ".lora_" in name for name in here)
    assert all(torch.equal(value, whole.model.parameters()[name]) for name, value in here.items())
    assert whole_shapes(whole.model.spec) == {n: tuple(p.shape) for n, p in whole.model.parameters().items()}
    if family == "llama":  # words of the others are hidden by their places
        for blocks in (None, 2):
            found = examine(tmp_path / "up", "decode", [], "all", None, 0, CPU, blocks=blocks)
            assert {word.text for word in found.words or ()} == words_of(texts)
            assert blocks is None or "proven" not in (found.certificates or ())


def test_adapters_of_a_block_that_the_model_has_not_are_refused_with_blocks_too(folders, tmp_path, gradaudit):
    model, tokenizer = peft_model(folders["llama"], "llama")
    with capture(model, tmp_path / "up", tokenizer=tokenizer):
        step(model, tokenizer, sentences([3], 1), torch.optim.SGD(model.parameters(), lr=0.1))
    path = tmp_path / "up" / "model" / "adapter" / "adapter_model.safetensors"
    stored = load_file(path)
    save_file({name.replace("layers.2.", "layers.9."): value for name, value in stored.items()}, path)
    code, _, err = gradaudit("attack", tmp_path / "up", "--blocks", "2")
    assert code == 2
    assert "of another base model: it stands beside model.layers.9." in err
    save_file({name: value for name, value in stored.items() if "layers.2." in name}, path)
    code, _, err = gradaudit("attack", tmp_path / "up", "--blocks", "2")
    assert code == 2
    assert "stands beside later blocks alone: ask for more with --blocks" in err
