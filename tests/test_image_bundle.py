"""Bundles of images: what is captured is the gradient, attacked as in a case, and what is odd gets no further."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import gradaudit
from gradaudit.bundles.bundle import MANIFEST, TENSORS, load_bundle, save_bundle
from gradaudit.bundles.examine import examine
from gradaudit.bundles.model import MODEL, WEIGHTS
from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of, observation
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.images import ImageModel, LeNet, ResNet, load_image_model
from gradaudit.models.spec import ModelSpec
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given, ImageBatch, LocalTraining, Reconstruction

Image = pytest.importorskip("PIL.Image")
SHAPE = (1, 8, 8)
BATCH = ImageBatch(torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(5)), torch.tensor([3, 1]))
SHORT = ["steps=4", "restarts=1"]
CPU = torch.device("cpu")


def model_of(name: str = "lenet", seed: int = 0) -> ImageModel:
    return load_image_model(ModelSpec(name, "image-classification", 10, seed, image=SHAPE))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A bundle that names its model."""
    client = Client(model_of())
    update = client.update(BATCH, stream(0, "client"))
    return save_bundle(tmp_path / "update", client.model, update, knowledge_of(BATCH, update, Given()))


def read(picture: str) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(base64.b64decode(picture)))).copy()) / 255


def rewrite(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["model"] |= changes
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("architecture", [LeNet, ResNet])
def test_a_captured_step_is_the_gradient_at_the_weights_before_it(architecture, tmp_path: Path):
    module = architecture(SHAPE, 10)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    loss = torch.nn.functional.cross_entropy(module(BATCH.images), BATCH.labels)
    expected = dict(zip(before, torch.autograd.grad(loss, list(module.parameters())), strict=True))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.train()
    with gradaudit.capture(module, tmp_path / "b") as seen:
        torch.nn.functional.cross_entropy(module(BATCH.images), BATCH.labels).backward()
        optimizer.step()
    assert module.training
    assert seen.sentences == 2
    back = load_bundle(tmp_path / "b")
    assert back.model.spec.image == SHAPE
    assert back.manifest.knowledge["batch_size"] == 2
    assert back.manifest.knowledge["labels"] is None
    assert set(back.tensors) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(back.tensors[name], gradient)
        assert torch.equal(back.model.parameters()[name], before[name])
    for path in (tmp_path / "b" / MODEL / WEIGHTS, tmp_path / "b" / TENSORS):
        assert BATCH.images.numpy().tobytes()[:64] not in path.read_bytes(), "the batch stays at home"


def test_a_captured_change_is_after_minus_before(tmp_path: Path):
    module = LeNet(SHAPE, 10)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    optimizer, how = torch.optim.SGD(module.parameters(), lr=0.5), LocalTraining("sgd", 0.5, 2)
    with gradaudit.capture(module, tmp_path / "b", what="delta", training=how, sentences=2):
        for _ in range(2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(BATCH.images), BATCH.labels).backward()
            optimizer.step()
    back = load_bundle(tmp_path / "b")
    assert back.manifest.kind == "delta"
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(back.tensors[name], parameter.detach() - before[name])
    found = examine(tmp_path / "b", "ig", SHORT, "all", None, 0, CPU)
    assert len(found.images or ()) == 2


def test_what_cannot_be_captured_is_said(tmp_path: Path):
    module = LeNet(SHAPE, 10)
    with pytest.raises(BadInputError, match="no images"), gradaudit.capture(module, tmp_path / "b"):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
    with pytest.raises(NotSupportedError, match="LeNet"), gradaudit.capture(torch.nn.Linear(2, 2), tmp_path / "b"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match="cannot write"), gradaudit.capture(module, tmp_path / "file" / "b"):
        torch.nn.functional.cross_entropy(module(BATCH.images), BATCH.labels).backward()


def test_text_is_not_captured_without_its_tokenizer(load, tmp_path: Path):
    module = load("bert").module
    with pytest.raises(BadInputError, match="tokenizer"), gradaudit.capture(module, tmp_path / "b"):
        pass


def test_it_is_attacked_as_in_a_case(made: Path):
    found = examine(made, "ig", SHORT, "all", None, 3, CPU)
    assert (found.attack, found.count, found.texts) == ("ig", 2, ())
    client = Client(model_of())
    update = client.update(BATCH, stream(0, "client"))
    seen = observation(client.model, update, Selection("all"), knowledge_of(BATCH, update, Given()))
    direct = build("attack", "ig", {"steps": 4, "restarts": 1})(seen, stream(3, "attack", 0))
    assert direct.images is not None
    for picture, image in zip(found.images or (), direct.images, strict=True):
        torch.testing.assert_close(read(picture), image[0], atol=0.5 / 255 + 1e-6, rtol=0)
    assert found.labels == direct.labels
    assert found.as_json()["images"] == list(found.images or ())


@pytest.mark.parametrize(("changes", "said"), [
    ({"labels": 100_000, "image": [64, 512, 512]}, "MiB"), ({"image": [1, 8, 513]}, "4 to 512 pixels"),
    ({"image": [0, 8, 8]}, "channels"), ({"image": [65, 8, 8]}, "channels"),
    ({"image": [3, 8, 8]}, "another model|shape"),
    ({"image": None}, "one is wrong"), ({"task": "classification"}, "one is wrong"),
    ({"name": "lenett"}, "did you mean"), ({"seed": 1}, "another model"), ({"layers": 2}, "neither blocks"),
    ({"inside": True}, "no folder 'model'"), ({"labels": 9}, "another model|shape"),
    ({"name": "lenet:/etc/passwd"}, "on this machine"),
])  # fmt: skip
def test_a_model_that_is_not_the_updates_is_refused(made: Path, changes, said):
    rewrite(made, **changes)
    with pytest.raises(BadInputError, match=said):
        load_bundle(made)


def test_a_large_layer_may_be_frozen(tmp_path: Path):
    """Its weights are not sent: 12 MB of a model for 40 kB of an update, and honest."""
    model = load_image_model(ModelSpec("lenet", "image-classification", 1000, 0, image=(1, 64, 64)))
    client, batch = Client(model, freeze=("head",)), ImageBatch(torch.rand(1, 1, 64, 64), torch.tensor([7]))
    update = client.update(batch, stream(0, "client"))
    save_bundle(tmp_path, model, update, knowledge_of(batch, update, Given()))
    assert set(load_bundle(tmp_path).tensors) == set(update.tensors)


def test_another_model_that_is_named_takes_the_place_of_the_one_inside(tmp_path: Path):
    module = LeNet(SHAPE, 10)
    with gradaudit.capture(module, tmp_path / "b"):
        torch.nn.functional.cross_entropy(module(BATCH.images), BATCH.labels).backward()
    own = tmp_path / "b" / MODEL / WEIGHTS
    assert load_bundle(tmp_path / "b", model=f"lenet:{own}").model.spec.name == f"lenet:{own}"
    with pytest.raises(BadInputError, match="another model"):
        load_bundle(tmp_path / "b", model="lenet")


def test_an_image_of_nan_is_none(made: Path, monkeypatch):
    images = BATCH.images.clone()
    images[0, 0, 0, 0] = torch.nan
    monkeypatch.setattr("gradaudit.attacks.ig.InvertingGradients.run", lambda *_: Reconstruction(images=images))
    found = examine(made, "ig", [], "all", None, 0, CPU)
    assert found.count == 1
    torch.testing.assert_close(read((found.images or ())[0]), BATCH.images[1, 0], atol=0.5 / 255 + 1e-6, rtol=0)


@pytest.mark.parametrize("spoil", ["nan", "shape", "foreign", "truncated"])
def test_weights_inside_are_checked(spoil, tmp_path: Path):
    module = LeNet(SHAPE, 10)
    with gradaudit.capture(module, tmp_path / "b"):
        torch.nn.functional.cross_entropy(module(BATCH.images), BATCH.labels).backward()
    path = tmp_path / "b" / MODEL / WEIGHTS
    weights = load_file(path)
    if spoil == "nan":
        weights["head.bias"][0] = torch.nan
    if spoil == "shape":
        weights["head.bias"] = torch.zeros(11)
    if spoil == "foreign":
        weights["head.bias"] += 1
    save_file(weights, path)
    if spoil == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInputError):
        load_bundle(tmp_path / "b")


def test_the_command_saves_pictures(made: Path, tmp_path: Path, gradaudit):
    short = ("--attack", "ig", "--set", "steps=2", "--set", "restarts=1")
    code, out, err = gradaudit("attack", made, *short, "--save", tmp_path / "seen")
    assert code == 0
    assert ": 2 images in" in " ".join(out.split())
    assert "2 images written to" in err
    pictures = sorted((tmp_path / "seen").iterdir())
    assert [p.name for p in pictures] == ["image-1.png", "image-2.png"]
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in pictures)
    code, out, _ = gradaudit("attack", made, *short, "--json")
    assert [base64.b64decode(p) for p in json.loads(out)["images"]] == [p.read_bytes() for p in pictures]
    code, out, _ = gradaudit("attack", made, made, *short, "--save", tmp_path / "rounds")
    assert code == 0
    assert "sentences" not in out
    assert len(list((tmp_path / "rounds").glob("round-?/image-?.png"))) == 4


def test_what_does_not_fit_ends_with_2_before_any_attack(made: Path, tmp_path: Path, monkeypatch, gradaudit):
    (tmp_path / "file").touch()
    ran = []
    monkeypatch.setattr("gradaudit.attacks.ig.InvertingGradients.run", lambda *_: ran.append(1))
    for arguments, said in (
        (["--save", tmp_path / "file" / "x"], "choose another --save"),
        (["--attack", "dager"], "does not support task"),
        (["--blocks", "1"], "neither blocks"),
        (["--selection", "0:q"], "no attention"),
        (["--attack", "lti-images"], "has no inverter"),
        (["--attack", "gigip"], "must be given public"),
    ):
        code, out, err = gradaudit("attack", made, *arguments)
        assert code == 2, said
        assert said in " ".join(err.split())
        assert out == ""
    assert not ran
