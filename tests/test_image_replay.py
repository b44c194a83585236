"""Local steps on images replayed: the oracle is the client, who really trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of, observation
from gradaudit.data.images import load_images, public_images
from gradaudit.data.spec import DataSpec
from gradaudit.judge.images import ImageJudge
from gradaudit.leakage.images.matching import ImageMatch, ImageObjective
from gradaudit.leakage.images.replay import ImageReplay, image_objective
from gradaudit.models.images import ImageModel, load_image_model
from gradaudit.models.spec import ModelSpec
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given, ImageBatch, LocalTraining

SHAPE = (1, 8, 8)
BATCH = ImageBatch(torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(5)).double(), torch.tensor([3, 1]))


def scene(
    how: LocalTraining,
    name: str = "lenet",
    batch: ImageBatch = BATCH,
    freeze: tuple[str, ...] = (),
    seen: str = "all",
    dtype: torch.dtype = torch.float64,
):
    made = load_image_model(ModelSpec(name, "image-classification", 10, 0, image=SHAPE))
    client = Client(ImageModel(made.module.to(dtype), made.spec, made.width, made.depth), how, freeze=freeze)
    update = client.update(batch, stream(0, "client"))
    return observation(client.model, update, Selection(seen), knowledge_of(batch, update, Given(labels=True)))


@pytest.mark.parametrize("selection", ["all", "head"])
@pytest.mark.parametrize("freeze", [(), ("head",)])
@pytest.mark.parametrize("name", ["lenet", "resnet"])
def test_the_truth_explains_a_weight_change_of_several_steps(name, freeze, selection):
    if freeze and selection == "head":
        return  # nothing is sent of it
    seen = scene(LocalTraining("sgd", 0.5, epochs=3), name, freeze=freeze, seen=selection)
    objective = image_objective(seen, ImageMatch(), 8)
    assert objective.details() == {"replayed_steps": 3}
    with torch.no_grad():
        replayed = float(objective(BATCH.images[None], BATCH.labels[None])[0])
        as_one = float(ImageObjective(seen, ImageMatch())(BATCH.images[None], BATCH.labels[None])[0])
    assert replayed < 1e-10
    assert as_one > 1e-5


def test_minibatches_are_taken_in_the_guess_s_order():
    """Of the orders of two images one is the client's: taken in that, the truth explains the change."""
    seen = scene(LocalTraining("sgd", 0.5, epochs=1, minibatch=1))
    objective = image_objective(seen, ImageMatch(), 8)
    both = torch.stack([BATCH.images, BATCH.images.flip(0)]), torch.stack([BATCH.labels, BATCH.labels.flip(0)])
    with torch.no_grad():
        values = sorted(objective(*both).tolist())
    assert values[0] < 1e-10 < 1e-6 < values[1]
    assert "order" in objective.notes()[0]
    whole = image_objective(scene(LocalTraining("sgd", 0.5, epochs=2, minibatch=2)), ImageMatch(), 8)
    assert whole.notes() == ()


@pytest.mark.parametrize("how", ["cosine", "sign"])
def test_one_step_replayed_is_the_gradient(how):
    training = LocalTraining("sgd", 0.05)
    seen, match = scene(training), ImageMatch(how)
    images = torch.rand(3, 2, *SHAPE, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    labels = BATCH.labels.expand(3, 2)
    found = []
    for objective in (ImageReplay(seen, match, training, 1), ImageObjective(seen, match)):
        value = objective(images, labels)
        found.append((value.detach(), torch.autograd.grad(value.sum(), images)[0]))
    torch.testing.assert_close(found[0], found[1])


def test_the_slope_of_three_steps_equals_finite_differences():
    objective = image_objective(scene(LocalTraining("sgd", 0.5, epochs=3)), ImageMatch(), 8)
    rng = torch.Generator().manual_seed(0)
    at, direction = (torch.rand(1, 2, *SHAPE, generator=rng).double() for _ in range(2))
    at.requires_grad_()
    labels = torch.full((1, 2, 10), 0.1).double().requires_grad_()
    slope, by_label = torch.autograd.grad(objective(at, labels).sum(), (at, labels))
    with torch.no_grad():
        up, down = (float(objective(at + s * direction, labels)[0]) for s in (1e-6, -1e-6))
    assert float((slope * direction).sum()) == pytest.approx((up - down) / 2e-6, rel=1e-4)
    assert float(by_label.abs().sum()) > 0


def test_gigip_replays_as_well():
    pytest.importorskip("sklearn")
    digits = load_images(DataSpec(source="digits"), Path())
    seen = scene(LocalTraining("sgd", 0.1, epochs=2), batch=digits.batch([0]), dtype=torch.float32)
    seen = replace(seen, public=public_images(digits, digits, [(0,)]))
    seen = replace(seen, knowledge=replace(seen.knowledge, public="digits"))
    short = {"latent_steps": 2, "weight_steps": 2, "restarts": 1, "training_steps": 2, "latent": 8}
    found = [build("attack", "gigip", short | {"replayed_steps": n})(seen, stream(0, "attack")) for n in (8, 0)]
    assert [one.details.get("replayed_steps") for one in found] == [2, None]
    assert found[0].details["gradient_evaluations"] == 2 * found[1].details["gradient_evaluations"]
    assert found[0].details["distance"] != found[1].details["distance"]


def test_what_is_replayed_and_what_is_not():
    seen = scene(LocalTraining("sgd", 0.05, epochs=3))
    assert type(image_objective(seen, ImageMatch(), 3)) is ImageReplay
    for most in (0, 2):
        one = image_objective(seen, ImageMatch(), most)
        assert type(one) is ImageObjective
        assert one.notes() == ("a weight change of 3 local steps was read as one gradient",)
    once = image_objective(scene(LocalTraining("sgd", 0.05)), ImageMatch(), 8)
    assert type(once) is ImageObjective
    assert once.notes() == ()
    as_gradient = image_objective(replace(seen, kind="gradient"), ImageMatch(), 8)
    assert (type(as_gradient), as_gradient.notes()) == (ImageObjective, ())


def test_replaying_reads_what_one_gradient_does_not():
    pytest.importorskip("sklearn")
    digit = load_images(DataSpec(source="digits"), Path()).batch([0])
    seen, found = scene(LocalTraining("sgd", 0.1, epochs=4), batch=digit, dtype=torch.float32), {}
    for steps in (8, 0):
        attack = build("attack", "ig", {"steps": 200, "restarts": 2, "replayed_steps": steps})
        found[steps] = attack(seen, stream(0, "attack"))
    errors = {n: ImageJudge().judge(digit, one).scores["mse"] for n, one in found.items()}
    assert found[8].details["replayed_steps"] == 4
    assert found[8].details["gradient_evaluations"] == 4 * found[0].details["gradient_evaluations"]
    assert found[8].notes == ()
    assert "read as one gradient" in found[0].notes[0]
    assert found[8].details["distance"] < 0.5 * found[0].details["distance"]
    assert errors[8] < 0.5 * errors[0]
