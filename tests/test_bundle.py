"""Bundles: round trip, preflight, and files from elsewhere that must not get far."""

from __future__ import annotations

import json
import shutil
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
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given


@pytest.fixture
def made(load, tmp_path: Path):
    model = load("llama")
    client = Client(model)
    batch = tiny_models.batch_of(model, tiny_models.sentences([4, 3], seed=1))
    update = client.update(batch, stream(0, "client"))
    folder = tmp_path / "update"
    own = folder / "model"
    model.module.save_pretrained(own)
    model.tokenizer.save_pretrained(own)
    bundle.save_bundle(folder, model, update, knowledge_of(batch, update, Given()), inside=True)
    return folder, update, batch


def rewrite(folder: Path, **tensors: torch.Tensor) -> None:
    """Replace tensors of a bundle and mend its manifest, as a writer of odd bundles would."""
    data = load_file(folder / bundle.TENSORS) | tensors
    data = {name: t for name, t in data.items() if t is not None}
    save_file(data, folder / bundle.TENSORS)
    manifest = json.loads((folder / bundle.MANIFEST).read_text())
    manifest["tensors"] = {name: list(t.shape) for name, t in data.items()}
    manifest["sha256"] = bundle._sha256(folder / bundle.TENSORS)
    (folder / bundle.MANIFEST).write_text(json.dumps(manifest))


def test_round_trip_keeps_every_number_and_what_is_known(made):
    folder, update, batch = made
    back = bundle.load_bundle(folder)
    assert set(back.tensors) == set(update.tensors)
    assert all(torch.equal(back.tensors[n], t) for n, t in update.tensors.items())
    seen = back.observation(Selection("all"))
    assert seen.kind == "gradient"
    assert seen.knowledge.batch_size == 2
    assert seen.knowledge.dropout == 0.0
    assert seen.knowledge.lengths is None
    assert not any(t in (folder / bundle.MANIFEST).read_text() for t in batch.texts)


def test_it_is_its_owners_alone(made, load, tmp_path):
    folder, _, _ = made
    for name in (bundle.TENSORS, bundle.MANIFEST):
        assert (folder / name).stat().st_mode & 0o077 == 0, "an update is as private as its batch"


def test_an_attack_on_the_bundle_recovers_the_batch(made):
    from gradaudit.bundles.examine import examine

    folder, _, batch = made
    found = examine(folder, "dager", [], "all", None, 0, torch.device("cpu"))
    assert sorted(found.ids) == sorted(map(tuple, batch.sequences()))
    assert found.as_json()["scores"] is None


@pytest.mark.parametrize(("attack", "said"), [("dager", True), ("decode", False)])
def test_an_attack_that_does_not_reckon_with_dropout_says_so_and_what_does(load, tmp_path, attack, said):
    model = load("bert")
    batch = tiny_models.batch_of(model, tiny_models.sentences((5, 4), 1))
    client = Client(model, dropout=True)
    update = client.update(batch, stream(0, "client"))
    model.module.save_pretrained(tmp_path / "b" / "model")
    model.tokenizer.save_pretrained(tmp_path / "b" / "model")
    bundle.save_bundle(tmp_path / "b", model, update, knowledge_of(batch, update, Given()), inside=True)
    found = examine(tmp_path / "b", attack, (), "all", None, 0, torch.device("cpu"))
    assert any("--attack decode" in note for note in found.notes) == said


def test_not_a_bundle(tmp_path: Path):
    with pytest.raises(BadInputError, match="no such bundle"):
        bundle.load_bundle(tmp_path / "none")
    with pytest.raises(BadInputError, match=r"no manifest\.json"):
        bundle.load_bundle(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 7, 100, 0.5, -1])
def test_a_truncated_file_is_refused(made, keep):
    folder, _, _ = made
    path = folder / bundle.TENSORS
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(BadInputError, match=r"truncated|empty"):
        bundle.load_bundle(folder)


def test_a_foreign_file_is_refused(made):
    folder, _, _ = made
    (folder / bundle.TENSORS).write_bytes(b"PK\x03\x04 this is a zip, or a pickle" * 50)
    with pytest.raises(BadInputError, match="not a safetensors file"):
        bundle.load_bundle(folder)


def test_a_header_that_asks_for_the_moon_is_refused(made):
    folder, _, _ = made
    header = b'{"x":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    (folder / bundle.TENSORS).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BadInputError, match="truncated"):
        bundle.load_bundle(folder)


def test_one_flipped_bit_is_noticed(made):
    folder, _, _ = made
    path = folder / bundle.TENSORS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadInputError, match="sha256"):
        bundle.load_bundle(folder)


def name_of(model) -> str:
    return model.views(0, "q")[0].parameter


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: torch.full_like(t, float("nan")), "NaN"),
        (lambda t: torch.full_like(t, float("inf")), "NaN or infinite"),
        (lambda t: t[:-1].contiguous(), "has shape"),
        (lambda t: t.to(torch.int64), "dtype"),
    ],
)
def test_preflight_stops_what_cannot_be_attacked(made, load, spoil, said: str):
    folder, update, _ = made
    name = name_of(load("llama"))
    rewrite(folder, **{name: spoil(update.tensors[name])})
    with pytest.raises(BadInputError, match=said) as caught:
        bundle.load_bundle(folder)
    assert name in str(caught.value)


def test_an_all_zero_update_is_refused(made):
    folder, update, _ = made
    rewrite(folder, **{n: torch.zeros_like(t) for n, t in update.tensors.items()})
    with pytest.raises(BadInputError, match="all zero"):
        bundle.load_bundle(folder)


def test_extra_tensors_are_refused_and_missing_ones_are_said(made, load):
    folder, _, _ = made
    name = name_of(load("llama"))
    rewrite(folder, **{name: None})
    assert any("not in the update" in f.text and name in f.text for f in bundle.load_bundle(folder).findings)
    rewrite(folder, surprise=torch.ones(3))
    with pytest.raises(BadInputError, match="'surprise'"):
        bundle.load_bundle(folder)


def test_a_strange_scale_is_a_warning(made):
    folder, update, _ = made
    rewrite(folder, **{n: t * 1e9 for n, t in update.tensors.items()})
    assert any("scale" in f.text for f in bundle.load_bundle(folder).findings)


def test_another_model_is_refused(made, folders):
    folder, _, _ = made
    with pytest.raises(BadInputError, match="another model"):
        bundle.load_bundle(folder, model=f"random:{folders['llama']}")


def test_other_weights_inside_are_refused(made, load):
    folder, _, _ = made
    weights = load_file(folder / "model" / "model.safetensors")
    first = sorted(weights)[0]
    save_file(weights | {first: weights[first] + 1}, folder / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInputError, match="another model"):
        bundle.load_bundle(folder)


def test_a_model_far_larger_than_its_file_is_not_built(made):
    folder, _, _ = made
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text()) | {"hidden_size": 8192, "intermediate_size": 65536}
    path.write_text(json.dumps(config))
    with pytest.raises(BadInputError, match="configured for"):
        bundle.load_bundle(folder)
    path.write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(BadInputError, match="layers"):
        bundle.load_bundle(folder)


def test_a_pickled_model_is_never_read(made):
    folder, _, _ = made
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")
    with pytest.raises(BadInputError):
        bundle.load_bundle(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2}', '{"format": 1, "kind": "gradient", "extra": 1}'])
def test_a_manifest_that_is_none(made, text: str):
    folder, _, _ = made
    (folder / bundle.MANIFEST).write_text(text)
    with pytest.raises(BadInputError, match="is not a manifest"):
        bundle.load_bundle(folder)


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("secret", 1, "unknown entry 'secret'"),
        ("lengths", ["x"], "lengths.0"),
        ("longest", "long", "longest"),
        ("longest", 0, "longest must be at least 1"),
        ("lengths", [3, -1], "lengths must be at least 1"),
        ("lengths", [3], "lengths must be as many as batch_size says"),
        ("lengths", [], "lengths must be as many"),
        ("labels", [1], "labels must be as many"),
        ("labels", [-100, 0], "labels must be at least 0"),
        ("labels", [0, 7], "labels must be below 2"),
        ("batch_size", 10**8, "batch_size must be at most 4096"),
        ("defenses", [{}], "defenses: "),
        ("defenses", [{"name": "sing"}], "did you mean 'sign'"),
        ("defenses", [{"name": "topk", "keep": 3.0}], "defenses: "),
        ("dropout", 1.0, "dropout must be"),
        ("dropout", float("nan"), "dropout must be"),
        ("training", {"optimizer": "sgd", "learning_rate": 0.0}, "learning_rate must be above 0"),
        ("training", {"optimizer": "sgd", "epochs": 0}, "training.epochs must be at least 1"),
        ("training", {"optimizer": "sgd", "lr": 1}, "training"),
    ],
)
def test_knowledge_of_another_kind_is_refused(made, entry, value, said):
    folder, _, _ = made
    manifest = json.loads((folder / bundle.MANIFEST).read_text())
    manifest["knowledge"][entry] = value
    (folder / bundle.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadInputError, match=said):
        bundle.load_bundle(folder).observation(Selection("all"))


def test_an_attack_without_a_counter_to_what_the_bundle_names_is_not_run(made):
    folder, _, _ = made
    manifest = json.loads((folder / bundle.MANIFEST).read_text())
    manifest["knowledge"]["defenses"] = [{"name": "sign"}]
    (folder / bundle.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(NotSupportedError, match="'dager' has no counter to 'sign'"):
        examine(folder, "dager", (), "all", None, 0, torch.device("cpu"))
    assert examine(folder, "blind", (), "all", None, 0, torch.device("cpu")).texts


def test_a_folder_that_cannot_be_written(made, load, tmp_path: Path):
    folder, update, _ = made
    from gradaudit.types import Knowledge

    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(BadInputError, match="cannot write the bundle"):
        bundle.save_bundle(blocked, load("llama"), update, Knowledge())
    shutil.rmtree(folder)
