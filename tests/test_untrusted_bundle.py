"""Bundles that were made to harm: nothing outside their folder is read, and no more memory taken than files justify."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from gradaudit.bundles import bundle
from gradaudit.bundles.examine import examine
from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of
from gradaudit.errors import AuditError, BadInputError, BrokenDownError
from gradaudit.registry import known
from gradaudit.streams import stream
from gradaudit.types import Given


@pytest.fixture(scope="module")
def kept(load, tmp_path_factory) -> Path:
    model = load("bert")
    batch = tiny_models.batch_of(model, tiny_models.sentences([4, 3], seed=1))
    update = Client(model).update(batch, stream(0, "client"))
    folder = tmp_path_factory.mktemp("untrusted") / "update"
    model.module.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    return bundle.save_bundle(folder, model, update, knowledge_of(batch, update, Given()), inside=True)


@pytest.fixture
def made(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "update"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tokenizer(folder: Path, stage: str, value: Any) -> None:
    change(folder / "model" / "tokenizer.json", **{stage: value})


def test_what_was_captured_is_read(made: Path):
    assert bundle.load_bundle(made).tensors


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_labels", 10**9, "num_labels = 1000000000 is out of bounds"),
        ("num_hidden_layers", 10**6, "layers = 1000000 is out of bounds"),
        ("max_position_embeddings", 10**9, "out of bounds"),
        ("chunk_size_feed_forward", 3, "out of bounds"),
        ("hidden_dropout_prob", float("nan"), "out of bounds"),
        ("_attn_implementation", "someone/kernels", "key '_attn_implementation'"),
        ("attn_implementation", "someone/kernels", "key 'attn_implementation'"),
        ("auto_map", {"AutoModel": "x--y.Z"}, "key 'auto_map'"),
        ("quantization_config", {"quant_method": "gptq"}, "key 'quantization_config'"),
        ("hidden_size", "wide", "model"),
        ("num_attention_heads", 0, "model"),
        ("hidden_act", 7, "model"),
        ("id2label", {"a": "b"}, "model"),
        ("pad_token_id", 10**6, "model"),
        ("model_type", ["bert"], "model"),
    ],
)
def test_a_configuration_out_of_bounds_is_refused(made: Path, key: str, value: Any, said: str):
    change(made / "model" / "config.json", **{key: value})
    with pytest.raises(BadInputError, match=said):
        bundle.load_bundle(made)


@pytest.mark.parametrize("target", ["/dev/zero", "../../other/model.safetensors", "/tmp/model.safetensors", 3])
def test_an_index_reads_nothing_outside_the_folder(made: Path, target: Any):
    weights = load_file(made / "model" / "model.safetensors")
    (made / "model" / "model.safetensors").unlink()
    save_file(weights, made / "model" / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = made / "model" / "model.safetensors.index.json"
    where = dict.fromkeys(weights, "model-00001-of-00001.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert bundle.load_bundle(made).tensors, "what lies in its folder is read"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where | {next(iter(where)): target}}))
    with pytest.raises(BadInputError, match="weights that are not in its folder"):
        bundle.load_bundle(made)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "vocab.txt"])
def test_no_link_is_followed_and_no_device_read(made: Path, tmp_path: Path, name: str):
    path = made / "model" / name
    outside = tmp_path / "outside"
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("a\n")
    for target in (outside, Path("/dev/zero")):
        path.symlink_to(target)
        with pytest.raises(BadInputError, match="link or no plain file"):
            bundle.load_bundle(made)
        path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadInputError, match="link or no plain file"):
        bundle.load_bundle(made)


def test_a_folder_that_is_a_link_is_not_followed(made: Path, tmp_path: Path):
    (made / "model").rename(tmp_path / "elsewhere")
    (made / "model").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInputError, match="no folder 'model'"):
        bundle.load_bundle(made)


@pytest.mark.parametrize("name", ["adapter_config.json", "pytorch_model.bin", "modeling.py", "tokenizer.model"])
def test_files_that_no_capture_writes_are_refused(made: Path, name: str):
    """With adapter_config.json in it, transformers reads the base model that this names, wherever that is."""
    (made / "model" / name).write_text('{"base_model_name_or_path": "/somewhere/else", "peft_type": "LORA"}')
    with pytest.raises(BadInputError, match=f"{name} is no file of a captured model"):
        bundle.load_bundle(made)


@pytest.mark.parametrize("name", [".", "random:/tmp", "lenet:/etc/passwd"])
def test_a_manifest_chooses_no_folder_of_this_machine(made: Path, name: str, monkeypatch):
    monkeypatch.chdir(made)
    manifest = json.loads((made / bundle.MANIFEST).read_text())
    manifest["model"] |= {"inside": False, "name": name}
    (made / bundle.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadInputError, match=f"on this machine; to read it, say so: --model {name}"):
        bundle.load_bundle(made)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"}
FRAME = {"type": "TemplateProcessing", "pair": [], "single": [{"Sequence": {"id": "A", "type_id": 0}}],
         "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2] * 1000, "tokens": ["[CLS]"] * 1000}}}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "value", "said"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [REPLACE, REPLACE, REPLACE]}, "makes 512 characters of one"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "type 'Precompiled'"),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 100}, "makes 100 characters"),
        ("decoder", {"type": "Sequence", "decoders": [REPLACE, REPLACE]}, "makes 64 characters of one"),
        ("post_processor", FRAME | {"single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}] * 9}, "more than 64"),
        ("post_processor", FRAME | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 99}, "more than 64"),
        ("padding", {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0}, "fills texts up"),
        ("normalizer", 3, "cannot be used"),
        ("model", {"type": "WordLevel", "vocab": {}, "unk_token": "x"}, "cannot be used"),
        ("added_tokens", "none", "cannot be used"),
    ],
)
def test_a_tokenizer_makes_not_much_of_little(made: Path, stage: str, value: Any, said: str):
    change_tokenizer(made, stage, value)
    with pytest.raises(BadInputError, match=said):
        bundle.load_bundle(made)


@pytest.mark.parametrize("key", ["tokenizer_file", "vocab_file", "auto_map"])
def test_a_tokenizers_configuration_names_no_file(made: Path, key: str):
    change(made / "model" / "tokenizer_config.json", **{key: "/etc/passwd"})
    with pytest.raises(BadInputError, match=f"key '{key}'"):
        bundle.load_bundle(made)


def test_files_are_bounded_before_they_are_read(made: Path):
    with open(made / "model" / "tokenizer.json", "r+b") as file:
        file.truncate(1 << 36)
    with pytest.raises(BadInputError, match="larger than any such file"):
        bundle.load_bundle(made)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("data", [b"", b"[" * 3000, b"\xff\xfe", b'{"a": ' + b"9" * 6000 + b"}", b"null"])
def test_damaged_files_end_in_a_sentence(made: Path, name: str, data: bytes):
    (made / "model" / name).write_bytes(data)
    with pytest.raises(BadInputError):
        bundle.load_bundle(made)


def test_a_truncated_model_ends_in_a_sentence(made: Path):
    path = made / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadInputError, match="truncated or not a safetensors file"):
        bundle.load_bundle(made)


class PanicException(BaseException):
    """As tokenizers raises it out of Rust."""


def test_a_library_that_panics_never_ends_as_a_crossed_threshold(made: Path, monkeypatch, gradaudit):
    def panic(self, text, **how):
        raise PanicException("index out of bounds")

    with monkeypatch.context() as inside:
        inside.setattr("transformers.PreTrainedTokenizerFast.__call__", panic)
        with pytest.raises(BadInputError, match="PanicException: index out of bounds"):
            bundle.load_bundle(made)
    monkeypatch.setattr(known("attack")["dager"], "run", lambda self, seen, rng: panic(self, ""))
    code, _, err = gradaudit("attack", made, "--attack", "dager")
    assert code == 2
    assert "a library broke down" in err


def test_an_attack_that_breaks_down_says_nothing_of_safety(made: Path, monkeypatch, gradaudit):
    def broken(self, seen, rng):
        raise IndexError("17 of 4")

    monkeypatch.setattr(known("attack")["dager"], "run", broken)
    with pytest.raises(BrokenDownError, match=r"'dager' broke down \(IndexError: 17 of 4\)"):
        examine(made, "dager", (), "all", None, 0, torch.device("cpu"))
    code, _, err = gradaudit("attack", made, "--attack", "dager")
    assert code == 3
    assert "no sign of safety" in err


@pytest.mark.parametrize("attack", ["dager", "decode"])
@pytest.mark.parametrize("value", [1e30, 1e-30])
def test_one_spike_is_no_traceback(made: Path, attack: str, value: float):
    data = load_file(made / bundle.TENSORS)
    for name in data:
        if name.endswith("query.weight"):
            data[name] = torch.zeros_like(data[name])
            data[name][3, 4] = value
    save_file(data, made / bundle.TENSORS)
    change(made / bundle.MANIFEST, sha256=bundle._sha256(made / bundle.TENSORS))
    with suppress(AuditError):
        examine(made, attack, (), "all", None, 0, torch.device("cpu"))
