"""Images: models against loops, the client against closed forms, data in all its forms, and their refusals."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tiny_models
from gradaudit.case import parse_case
from gradaudit.client.client import Client
from gradaudit.data.draw import draw, draw_numbers
from gradaudit.data.images import ImageRows, load_images, public_images
from gradaudit.data.spec import DataSpec
from gradaudit.data.text import TextRows
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.images import IMAGE_MODELS, ImageModel, load_image_model
from gradaudit.models.spec import ModelSpec
from gradaudit.registry import build, known
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given, ImageBatch, LocalTraining

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("sklearn")


def model_of(name: str = "lenet", image: tuple[int, int, int] = (1, 8, 8), seed: int = 0, **more) -> ImageModel:
    return load_image_model(ModelSpec(name, "image-classification", 10, seed, image=image, **more))


def batch_of(model: ImageModel, size: int, seed: int = 0) -> ImageBatch:
    rng = torch.Generator().manual_seed(seed)
    return ImageBatch(torch.rand(size, *model.shape, generator=rng), torch.randint(10, (size,), generator=rng))


def by_hand(model: ImageModel, images, labels) -> dict[str, torch.Tensor]:
    names, values = zip(*model.parameters().items(), strict=True)
    return dict(zip(names, torch.autograd.grad(model.loss(images, labels), values), strict=True))


# models


def test_lenet_has_the_papers_number_of_parameters():
    model = model_of(image=(3, 32, 32))
    assert sum(p.numel() for p in model.parameters().values()) == 15_826
    assert model.width == 768
    assert all(float(p.detach().abs().max()) <= 0.5 for p in model.parameters().values())
    assert max(float(p.detach().abs().max()) for p in model.parameters().values()) > 0.49


@pytest.mark.parametrize("name", sorted(IMAGE_MODELS))
def test_the_seed_decides_the_weights_and_the_name_says_that_they_are_random(name):
    one, same, other = model_of(name), model_of(name), model_of(name, seed=1)
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    assert one.spec.title == f"{name} (random weights)"


@pytest.mark.parametrize("image", [(1, 8, 8), (3, 32, 32), (1, 5, 9)])
@pytest.mark.parametrize("name", sorted(IMAGE_MODELS))
def test_many_gradients_at_once_are_those_of_a_loop(name, image):
    model = model_of(name, image)
    batch = batch_of(model, 6)
    each = model.example_gradients(batch.images, batch.labels)
    several = model.gradients(batch.images.view(3, 2, *image), batch.labels.view(3, 2))
    for n in range(6):
        alone = by_hand(model, batch.images[n : n + 1], batch.labels[n : n + 1])
        for key, value in alone.items():
            torch.testing.assert_close(each[key][n], value.detach(), rtol=1e-4, atol=1e-5)
    for n in range(3):
        pair = by_hand(model, batch.images[2 * n : 2 * n + 2], batch.labels[2 * n : 2 * n + 2])
        for key, value in pair.items():
            torch.testing.assert_close(several[key][n], value.detach(), rtol=1e-4, atol=1e-5)


def test_gradients_have_a_slope_by_the_images():
    """Against differences: what matching climbs down."""
    model = model_of()
    model.module.double()
    batch = batch_of(model, 1)
    images = batch.images.double()[None].requires_grad_()

    def energy(x):
        return sum(g.square().sum() for g in model.gradients(x, batch.labels[None]).values())

    slope = torch.autograd.grad(energy(images), images)[0]
    way = torch.randn(images.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step = 1e-5
    change = (energy(images.detach() + step * way) - energy(images.detach() - step * way)) / (2 * step)
    assert float((slope * way).sum()) == pytest.approx(float(change), rel=1e-6)


def test_weights_can_be_read_from_a_file_and_others_are_refused(tmp_path: Path):
    trained = {n: torch.full_like(p, 0.1) for n, p in model_of().parameters().items()}
    save_file(trained, tmp_path / "w.safetensors")
    model = model_of(f"lenet:{tmp_path}/w.safetensors")
    assert not model.spec.random_weights
    assert "random" not in model.spec.title
    assert all(bool((p == 0.1).all()) for p in model.parameters().values())
    for bad, said in (
        ({n: t for n, t in trained.items() if n != "head.bias"}, "differ at 'head.bias'"),
        (trained | {"head.bias": torch.zeros(11)}, "differ at 'head.bias'"),
        (trained | {"head.bias": torch.full((10,), torch.nan)}, "NaN"),
    ):
        save_file(bad, tmp_path / "bad.safetensors")
        with pytest.raises(BadInputError, match=said):
            model_of(f"lenet:{tmp_path}/bad.safetensors")
    (tmp_path / "no.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(BadInputError, match="not a safetensors file"):
        model_of(f"lenet:{tmp_path}/no.safetensors")
    with pytest.raises(BadInputError, match="there is no file"):
        model_of("lenet:nowhere.safetensors")


def test_what_an_image_model_does_not_have_is_said():
    with pytest.raises(BadInputError, match="did you mean 'lenet'"):
        model_of("lenett")
    with pytest.raises(BadInputError, match="4 to 512 pixels"):
        model_of(image=(1, 2, 2))
    with pytest.raises(BadInputError, match="neither blocks nor adapters"):
        model_of(layers=2)
    model = model_of()
    with pytest.raises(NotSupportedError, match="no roles"):
        Selection("0:q").views(model)
    assert list(Selection("head").views(model)) == ["head.weight", "head.bias"]


# the client


def test_one_gradient_is_autograds_and_one_step_of_sgd_its_multiple():
    model = model_of()
    batch = batch_of(model, 3)
    truth = by_hand(model, batch.images, batch.labels)
    one = Client(model).update(batch, stream(0, "c"))
    step = Client(model, LocalTraining("sgd", 0.5)).update(batch, stream(0, "c"))
    for name, value in truth.items():
        torch.testing.assert_close(one.tensors[name], value)
        torch.testing.assert_close(step.tensors[name], -0.5 * value, rtol=1e-4, atol=1e-6)
    assert (one.kind, step.kind) == ("gradient", "delta")


def test_clients_behind_secure_aggregation_send_the_mean_of_their_updates():
    model = model_of()
    batch = batch_of(model, 4)
    both = Client(model, clients=2).update(batch, stream(0, "c")).tensors
    parts = [Client(model).update(batch.take(torch.arange(n, n + 2)), stream(0, "c")).tensors for n in (0, 2)]
    for name, value in both.items():
        torch.testing.assert_close(value, (parts[0][name] + parts[1][name]) / 2)


@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("sgd", 0.5)], ids=["gradient", "step"])
@pytest.mark.parametrize("name", ["lenet", "resnet"])
def test_dp_sgd_clips_each_image_by_itself(name, training):
    pytest.importorskip("opacus")
    model = model_of(name)
    batch = batch_of(model, 5)
    clip, wanted = 0.3, {n: torch.zeros_like(p) for n, p in model.parameters().items()}
    for n in range(5):
        alone = by_hand(model, batch.images[n : n + 1], batch.labels[n : n + 1])
        norm = torch.sqrt(sum(g.square().sum() for g in alone.values()))
        assert float(norm) > clip, "each is really clipped"
        wanted = {k: w + alone[k].detach() * (clip / norm) / 5 for k, w in wanted.items()}
    guard = build("defense", "dp-sgd", {"clip": clip, "noise_multiplier": 0.0, "poisson": False})
    sent = Client(model, training, defenses=(guard,)).update(batch, stream(0, "c")).tensors
    scale = 1.0 if training.optimizer == "none" else -0.5
    for key, value in wanted.items():
        torch.testing.assert_close(sent[key], scale * value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", sorted(known("defense")))
def test_a_defense_works_on_images_or_is_refused_in_a_sentence(name):
    model, defense = model_of(), build("defense", name, {})
    if defense.acts_on in ("batch", "model and update"):
        with pytest.raises(NotSupportedError, match=f"defense '{name}' acts on words or on attention"):
            Client(model, defenses=(defense,))
        return
    behind = (build("defense", "topk", {}),) if name == "error-feedback" else ()
    sent = Client(model, defenses=(defense, *behind)).update(batch_of(model, 2), stream(0, "c"))
    assert {n: t.shape for n, t in sent.tensors.items()} == {n: p.shape for n, p in model.parameters().items()}
    assert sent.defenses[0]["name"] == name


def test_text_and_images_do_not_mix(load):
    text, images = load("bert"), model_of()
    with pytest.raises(BadInputError, match="a model of text trains on text"):
        Client(text).update(batch_of(images, 1), stream(0, "c"))
    with pytest.raises(BadInputError, match="not of the model's shape"):
        Client(images).update(batch_of(model_of(image=(3, 8, 8)), 1), stream(0, "c"))
    with pytest.raises(BadInputError, match="is for decoders"):
        Client(images, padding="left")
    seen = tiny_models.seen_of(
        Client(images), batch_of(images, 1), given=Given(lengths=True, longest=True, labels=True)
    )
    for name in known("attack"):
        if "image-classification" not in known("attack")[name].tasks:
            with pytest.raises(NotSupportedError, match="does not support task 'image-classification'"):
                build("attack", name, {})(seen, stream(0, "a"))


# data


def test_sixteen_bits_of_gray_are_scaled_and_not_cut_off(tmp_path):
    ramp = (np.arange(64).reshape(8, 8) * 1040).astype(np.uint16)
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
        Image.fromarray(ramp).save(tmp_path / name / "one.png")
    rows = load_images(DataSpec(path=str(tmp_path)), tmp_path)
    assert rows.shape == (1, 8, 8)
    assert np.array_equal(rows.pixels[0, 0].numpy(), (ramp // 257).astype(np.uint8))


def encoded(array: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, format=kind)
    return out.getvalue()


def drawn(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def parquet_of(path: Path, values: list, labels: list) -> DataSpec:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"image": values, "label": labels}), path)
    return DataSpec(path=str(path))


def test_the_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    rows = load_images(DataSpec(source="digits"), Path())
    assert rows.shape == (1, 8, 8)
    assert len(rows) == 1797
    assert rows.labels == tuple(load_digits().target)
    batch = rows.batch([5, 3])
    wanted = torch.tensor(load_digits().images[[5, 3]] / 16, dtype=torch.float32)
    assert float((batch.images[:, 0] - wanted).abs().max()) < 0.5 / 255 + 1e-6


@pytest.mark.parametrize("shape", [(8, 9), (8, 9, 3)], ids=["gray", "color"])
def test_parquet_and_folder_hold_the_same_images(tmp_path: Path, shape):
    arrays = [drawn(shape, n) for n in range(4)]
    names = ["cat", "dog", "cat", "dog"]
    spec = parquet_of(tmp_path / "a.parquet", [{"bytes": encoded(a), "path": "/etc/passwd"} for a in arrays], names)
    table = load_images(spec, Path())
    for n, name in enumerate(names):
        (tmp_path / "folder" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name / f"{n}.png").write_bytes(encoded(arrays[n]))
    folder = load_images(DataSpec(path="folder"), tmp_path)
    assert table.classes == folder.classes == ("cat", "dog")
    assert torch.equal(table.pixels[[0, 2, 1, 3]], folder.pixels)
    wanted = np.stack([a[None] if a.ndim == 2 else a.transpose(2, 0, 1) for a in arrays])
    assert np.array_equal(table.pixels.numpy(), wanted)
    assert table.labels == (0, 1, 0, 1)


def test_images_that_cannot_be_used_are_refused_in_a_sentence(tmp_path: Path):
    good = encoded(drawn((8, 8), 0))
    huge = encoded(np.zeros((4000, 4000), dtype=np.uint8))  # 16 MB of zeros in 16 kB
    for values, said in (
        ([good, good[:40]], "row 1 .* no readable image"),
        ([good, b"GIF89a" + good], "no readable image"),
        ([good, encoded(drawn((9, 8), 0))], "bring all images to one size"),
        ([good, huge], "4000 x 4000 pixels; at most 512 a side"),
    ):
        with pytest.raises(BadInputError, match=said):
            load_images(parquet_of(tmp_path / "a.parquet", values, [0, 1]), Path())
    with pytest.raises(BadInputError, match="holds no image bytes"):  # a path in the file is not followed
        load_images(parquet_of(tmp_path / "a.parquet", [{"bytes": None, "path": "x.png"}] * 2, [0, 1]), Path())
    with pytest.raises(BadInputError, match="there is no file or folder"):
        load_images(DataSpec(path="nowhere"), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInputError, match="holds no images"):
        load_images(DataSpec(path="empty"), tmp_path)
    (tmp_path / "a.csv").write_text("text\n1\n")
    with pytest.raises(BadInputError, match="holds no images"):
        load_images(DataSpec(path="a.csv"), tmp_path)


def test_images_are_drawn_as_texts_are():
    spec = DataSpec(shuffle_seed=101, batch_size=3, batches=4, skip=2)
    rows = TextRows(tuple(f"text {n}" for n in range(50)), None, (), "here", "")
    assert draw(spec, rows) == draw_numbers(spec, 50, "here")


def rows_of(pixels: torch.Tensor) -> ImageRows:
    labels = tuple(n % 2 for n in range(len(pixels)))
    return ImageRows(pixels, labels, ("a", "b"), "here", "")


def test_public_images_are_none_of_the_audited_ones_even_where_they_occur_twice():
    pixels = torch.randint(256, (12, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    pixels[7] = pixels[2]  # a copy of an audited one
    private = rows_of(pixels)
    audited = [(0, 2), (5,)]
    for source in (private, rows_of(torch.cat([pixels[3:], pixels[:1]]))):
        public = public_images(source, private, audited)
        hidden = private.batch([0, 2, 5]).images
        apart = (public.images[:, None] - hidden[None]).abs().flatten(2).amax(2)
        assert float(apart.min()) > 0
    assert len(public_images(private, private, audited).images) == 12 - 4
    with pytest.raises(BadInputError, match="no image is left"):
        public_images(private, private, [tuple(range(12))])
    with pytest.raises(BadInputError, match="they must be alike"):
        public_images(rows_of(torch.zeros(3, 3, 8, 8, dtype=torch.uint8)), private, audited)


def test_cases_of_images():
    case = parse_case({"task": "image-classification", "model": "lenet", "attack": {"name": "ig"}})
    assert case.data.source == "digits"
    written = parse_case(
        {"task": "image-classification", "model": "lenet", "attack": {"name": "ig"}, "data": {"source": "digits"}}
    )
    assert case.content_hash() == written.content_hash()
    more = parse_case(case.model_dump() | {"public": {"path": "x.parquet"}})
    assert more.content_hash() != case.content_hash()
    with pytest.raises(BadInputError, match="the embedded sample is text"):
        parse_case({"task": "image-classification", "attack": {"name": "ig"}, "data": {"source": "sample"}})


def test_ids_of_text_cases_did_not_change_when_images_came():
    """The id of the example case before there were images (commit 2af6f81)."""
    assert parse_case({"attack": {"name": "dager"}}).content_hash() == "5a68d1b85105a4ab"
