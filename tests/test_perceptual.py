"""LPIPS by weights that a user brings: a distance, by the package's own formula, and no file that is something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from gradaudit.audit import run as audit
from gradaudit.audit.prepare import prepare
from gradaudit.case import parse_case
from gradaudit.errors import BadInputError
from gradaudit.metrics.images import align_images
from gradaudit.metrics.perceptual import load_perceptual, perceptual_shapes
from gradaudit.streams import stream


def weights() -> dict[str, Tensor]:
    rng = stream(0, "weights")
    return {n: torch.rand(s, generator=rng) if n.startswith("lin") else 0.05 * torch.randn(s, generator=rng)
            for n, s in perceptual_shapes().items()}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lpips.safetensors"
    save_file(weights() | {"scaling_layer.shift": torch.zeros(3)}, path)
    return path


def alexnet(held: dict[str, Tensor]) -> nn.Sequential:
    """AlexNet's features as torchvision lays them out, its layers numbered as there."""
    net = nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(3, 2), nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(),
    )  # fmt: skip
    state = {name.split(".", 2)[2]: value for name, value in held.items() if name.startswith("net.")}
    net.load_state_dict(state)
    return net


@torch.no_grad()
def by_hand(one: Tensor, other: Tensor) -> float:
    held = weights()
    total, net = 0.0, alexnet(held)
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    sides = [((2 * x - 1) - shift[:, None, None]) / scale[:, None, None] for x in (one, other)]
    taps = {1: 0, 4: 1, 7: 2, 9: 3, 11: 4}
    for number, layer in enumerate(net):
        sides = [layer(x) for x in sides]
        if number in taps:
            a, b = (F.normalize(x, dim=0) for x in sides)
            total += float((held[f"lin{taps[number]}.model.1.weight"].flatten() @ (a - b).square().flatten(1)).mean())
    return total


@pytest.mark.parametrize("size", [32, 48])
def test_it_is_the_published_formula(file, size):
    images = torch.rand(3, 3, size, size, generator=stream(1, "images"))
    others = torch.rand(3, 3, size, size, generator=stream(2, "images"))
    found = load_perceptual(file)(images, others)
    assert found == pytest.approx([by_hand(a, b) for a, b in zip(images, others, strict=True)], rel=1e-4)
    assert load_perceptual(file)(images, images) == [0.0] * 3
    near = load_perceptual(file)(images, (images + 0.01 * others).clamp(0, 1))
    assert all(a is not None and b is not None and a < b for a, b in zip(near, found, strict=True))


def test_gray_images_count_as_three_equal_channels_and_small_ones_are_not_measured(file):
    gray = torch.rand(2, 1, 32, 32, generator=stream(1, "gray"))
    other = 1 - gray
    measured = load_perceptual(file)
    assert measured(gray, other) == measured(gray.expand(-1, 3, -1, -1), other.expand(-1, 3, -1, -1))
    assert measured(gray[..., :30, :30], other[..., :30, :30]) == [None, None]
    assert measured(gray[..., :31, :31], other[..., :31, :31])[0] is not None


def test_pairs_have_it_only_where_there_are_weights(file):
    images = torch.rand(2, 3, 32, 32, generator=stream(1, "images"))
    assert all(p.scores["lpips"] is None for p in align_images(images, images))
    pairs = align_images(images, images[:1], load_perceptual(file))
    assert pairs[0].scores["lpips"] == 0.0
    assert float(pairs[1].scores["lpips"] or 0) > 0, "an image that was not recovered is far away"


def test_a_case_names_the_file_and_its_id_changes_with_it(file, tmp_path):
    table = {"task": "image-classification", "model": "lenet", "attack": {"name": "blind"}}
    plain, named = parse_case(table), parse_case(table | {"metrics": {"lpips": file.name}})
    assert plain.content_hash() != named.content_hash()
    ready = prepare(named, tmp_path, torch.device("cpu"))
    (record,) = list(audit.run(ready, tmp_path / "out"))
    assert record.scores["lpips"] is None, "digits of 8 x 8 are too small"
    with pytest.raises(BadInputError, match="there is no file nowhere"):
        prepare(parse_case(table | {"metrics": {"lpips": "nowhere"}}), tmp_path, torch.device("cpu"))


def test_text_has_no_such_score():
    with pytest.raises(BadInputError, match="lpips is a score of images"):
        parse_case({"attack": {"name": "blind"}, "metrics": {"lpips": "weights"}})


def test_files_that_are_something_else_are_refused(file, tmp_path):
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    with pytest.raises(BadInputError, match="truncated or not a safetensors file"):
        load_perceptual(file)
    for change, said in (
        (
            {"lin0.model.1.weight": torch.zeros(1, 63, 1, 1)},
            r"'lin0.model.1.weight' of shape \[1, 64, 1, 1\] is missing",
        ),
        ({"net.slice1.0.bias": torch.full((64,), torch.nan)}, "NaN or infinite"),
    ):
        save_file(weights() | change, file)
        with pytest.raises(BadInputError, match=said):
            load_perceptual(file)
    with pytest.raises(BadInputError, match="no weights of LPIPS at"):
        load_perceptual(tmp_path / "nowhere")
