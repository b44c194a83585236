"""From a reading to the likeliest image: laws against closed forms, and images that come nearer beside the control."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributions import MultivariateNormal

from gradaudit.attacks.lti_images import LtiImages
from gradaudit.audit.fitting import fit
from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of, observation
from gradaudit.data.images import load_images, public_images
from gradaudit.data.spec import DataSpec
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.leakage.images.likelihood import ImageEvidence, has_law
from gradaudit.leakage.images.posterior import likeliest_images
from gradaudit.learned.images.features import compared, output_layer
from gradaudit.learned.images.fit import _by_blocks
from gradaudit.learned.images.kernel import fit_kernel
from gradaudit.learned.images.residuals import spread_of
from gradaudit.learned.scaling import scaling_of
from gradaudit.models.images import load_image_model
from gradaudit.models.spec import ModelSpec
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given, ImageBatch, LocalTraining, Observation, PublicImages

pytest.importorskip("sklearn")

RNG = torch.Generator().manual_seed(3)
DEFENSES: dict[str, tuple[str, dict[str, Any]] | None] = {
    "none": None,
    "gaussian": ("gaussian", {"sigma": 0.01}),
    "sign": ("sign", {}),
    "topk": ("topk", {"keep": 0.05}),
    "whole": ("topk", {"keep": 0.002, "whole": True}),
    "random": ("random-pruning", {"rate": 0.9}),
}


@pytest.fixture(scope="module")
def digits():
    return load_images(DataSpec(source="digits"), Path())


@pytest.fixture(scope="module")
def model():
    return load_image_model(ModelSpec("lenet", "image-classification", 10, 0, image=(1, 8, 8)))


def client_of(model, name: str) -> Client:
    how = DEFENSES[name]
    return Client(model, defenses=(build("defense", *how),) if how else ())


def seen_of(client: Client, batch: ImageBatch, **given: bool) -> Observation[Any]:
    update = client.update(batch, stream(0, "client"))
    knows = knowledge_of(batch, update, Given(**{"defenses": True, **given}))
    return observation(client.model, update, Selection("all"), knows, None)


@pytest.mark.parametrize(("rows", "pixels"), [(400, 12), (30, 64)])
def test_a_spread_is_the_normal_law_of_the_largest_directions(rows, pixels):
    residuals = torch.randn(rows, pixels, generator=RNG) @ torch.diag(torch.linspace(0.1, 2, pixels))
    spread = spread_of(residuals, 5)
    values = torch.linalg.eigvalsh(residuals.double().T @ residuals.double() / rows)[-5:]
    assert torch.allclose(spread.variances.double(), values, rtol=1e-4)
    assert torch.allclose(spread.directions.T @ spread.directions, torch.eye(5), atol=1e-4)
    assert float(spread.floor) == pytest.approx(0.1 * float(residuals.square().mean()), rel=1e-4)
    covariance = spread.directions @ torch.diag(spread.variances) @ spread.directions.T + spread.floor * torch.eye(
        pixels
    )
    law = MultivariateNormal(torch.zeros(pixels), covariance)
    some = torch.randn(6, pixels, generator=RNG)
    differences = spread(some) + law.log_prob(some)
    assert torch.allclose(differences, differences[0].expand(6), rtol=1e-4, atol=1e-2)


def test_a_kernels_spread_is_that_of_images_it_was_not_fitted_to():
    numbers, images = torch.randn(25, 6, generator=RNG) / 6**0.5, torch.rand(25, 1, 2, 3, generator=RNG)
    kernel, _ = fit_kernel(numbers, images, numbers[:5] + 0.1, images[:5], ridges=(1e-1,))
    sharpness, mean, off = float(kernel.sharpness), images.mean(0), []
    for row in range(25):
        rest = torch.arange(25) != row
        near = torch.exp(-sharpness * torch.cdist(numbers[rest], numbers[rest]).square()) + 1e-1 * torch.eye(24)
        weights = torch.linalg.solve(near, (images[rest] - mean).flatten(1))
        far = torch.exp(-sharpness * torch.cdist(numbers[[row]], numbers[rest]).square())
        off.append((images[row] - mean).flatten() - (far @ weights)[0])
    expected = spread_of(torch.stack(off))
    assert kernel.spread is not None
    assert torch.allclose(kernel.spread.variances, expected.variances, rtol=1e-3)
    assert float(kernel.spread.floor) == pytest.approx(float(expected.floor), rel=1e-3)


def test_blocks_weigh_alike_and_what_never_moved_says_nothing():
    values = torch.randn(50, 7, generator=RNG) * torch.tensor([1, 10, 100, 0, 5, 5, 5.0]) + 3
    scaling = _by_blocks(scaling_of(values), 0.5, values, [4, 3])
    assert bool(scaling.deviation[3].isinf())
    scaled = scaling(values)
    for block in (scaled[:, :4], scaled[:, 4:]):
        assert float(block.square().sum(1).mean()) == pytest.approx(0.5, rel=1e-4)
    spread = scaled.std(0)
    assert float(spread[1] / spread[0]) == pytest.approx(
        float(values[:, 1].std() / values[:, 0].std()) ** 0.5, rel=1e-3
    )


def test_the_output_layers_matrix_is_compared_by_what_it_read():
    features, slopes = torch.rand(2, 7, generator=RNG), torch.tensor([[0.5, -0.9, 0.4], [-0.2, 0.1, 0.1]])
    matrices = slopes[:, :, None] * features[:, None]
    others = torch.randn(2, 4, generator=RNG)
    shapes = {"first": (2, 1), "out": (3, 7), "last": (2,)}
    numbers = torch.cat([others[:, :2], matrices.flatten(1), others[:, 2:]], 1)
    rest, read = compared(numbers, shapes, "out")
    assert torch.equal(rest, others)
    assert torch.allclose(read, features / features.norm(dim=1, keepdim=True), atol=1e-5)
    (same,) = compared(numbers, shapes, None)
    assert same is numbers
    (alone,) = compared(matrices.flatten(1), {"out": (3, 7)}, "out")
    assert torch.allclose(alone, read, atol=1e-6)


def test_the_output_layer_is_found_where_it_is_seen(model):
    shapes = {name: tuple(p.shape) for name, p in model.parameters().items()}
    assert output_layer(model, shapes) == "head.weight"
    assert output_layer(model, {n: s for n, s in shapes.items() if n != "head.weight"}) is None


@pytest.mark.parametrize("name", DEFENSES)
def test_the_truth_explains_what_was_sent_and_other_images_do_not(digits, model, name):
    batch = digits.batch((0,))
    seen = seen_of(client_of(model, name), batch)
    evidence = ImageEvidence(seen)
    other = digits.batch((1,)).images
    right, wrong = evidence(torch.stack([batch.images, other]), batch.labels.expand(2, 1), 0.01).tolist()
    count = sum(value.numel() for value in seen.tensors.values())
    if name == "gaussian":
        assert right == pytest.approx(count / 2, rel=0.1), "half a square of unit noise a coordinate"
        assert wrong > right + 500
    else:
        assert right < 1e-3
        assert wrong > 1


@pytest.mark.parametrize("name", ["none", "topk", "whole", "random", "relative"])
def test_evidence_is_half_the_squared_distance_to_the_updates_that_would_have_been_sent_so(digits, model, name):
    batch, other = digits.batch((0,)), digits.batch((1,))
    noise = build("defense", "gaussian", {"sigma": 0.1, "relative": True})
    client = Client(model, defenses=(noise,)) if name == "relative" else client_of(model, name)
    seen = seen_of(client, batch)
    made = model.gradients(other.images[None], batch.labels[None])
    sent = torch.cat([v.flatten() for v in seen.tensors.values()])
    unit = float(sent[sent != 0].square().mean().sqrt())
    least = float(sent[sent != 0].abs().min())
    expected = 0.0
    for key, observed in seen.tensors.items():
        here, size = made[key][0], 0.1 * unit
        allowed = observed
        if name in ("topk", "whole"):
            bound = least if name == "whole" else float(observed[observed != 0].abs().min())
            allowed = torch.where(observed == 0, here.clamp(-bound, bound), observed)
        elif name == "random":
            allowed = torch.where(observed == 0, here, observed)
        elif name == "relative":
            size = 0.1 * float(observed.square().mean().sqrt()) / 1.01**0.5  # the noise's own share is in it
        expected += float((here - allowed).norm() ** 2) / size**2 / 2
    found = float(ImageEvidence(seen)(other.images[None], batch.labels[None], 0.1))
    assert found == pytest.approx(expected, rel=1e-3)


def test_of_the_whole_update_nothing_unsent_is_larger_than_the_smallest_number_sent_anywhere(digits, model):
    batch, other = digits.batch((0,)), digits.batch((1,))
    plain = seen_of(client_of(model, "none"), batch)
    name = "head.weight"
    largest = plain.tensors[name].abs() == plain.tensors[name].abs().max()
    sent = dict(plain.tensors) | {name: torch.where(largest, plain.tensors[name], 0.0)}
    found = {}
    for whole in (False, True):
        told = ({"name": "topk", "keep": 0.1, "whole": whole},)
        seen = replace(plain, tensors=sent, knowledge=replace(plain.knowledge, defenses=told))
        found[whole] = float(ImageEvidence(seen)(other.images[None], batch.labels[None], 0.1))
    assert found[True] > 1.01 * found[False], "small numbers of other tensors bound this one's only if all are compared"


def test_a_slack_scales_what_is_violated(digits, model):
    batch = digits.batch((0,))
    evidence = ImageEvidence(seen_of(client_of(model, "none"), batch))
    other = digits.batch((1,)).images[None]
    near, far = (float(evidence(other, batch.labels[None], slack)) for slack in (0.1, 0.2))
    assert near == pytest.approx(4 * far, rel=1e-4)
    observed = torch.cat([v.flatten() for v in seen_of(client_of(model, "none"), batch).tensors.values()])
    observed = observed[observed != 0]
    assert evidence.unit == pytest.approx(float(observed.square().mean().sqrt()), rel=1e-5)


@pytest.mark.parametrize("name", ["none", "gaussian", "sign", "topk"])
def test_the_truth_explains_the_weight_change_of_one_step(digits, model, name):
    batch, other = digits.batch((0,)), digits.batch((1,))
    how = {"gaussian": ("gaussian", {"sigma": 1e-3})}.get(name, DEFENSES[name])
    one = Client(model, training=LocalTraining("sgd", 0.1), defenses=(build("defense", *how),) if how else ())
    seen = seen_of(one, batch, training=True)
    assert seen.kind == "delta"
    evidence = ImageEvidence(seen)
    right, wrong = evidence(torch.stack([batch.images, other.images]), batch.labels.expand(2, 1), 0.01).tolist()
    count = sum(value.numel() for value in seen.tensors.values())
    assert right == pytest.approx(count / 2, rel=0.1) if name == "gaussian" else right < 1e-2
    assert wrong > right + 500


@pytest.mark.parametrize("training", [LocalTraining("sgd", 0.1, 2), LocalTraining("adamw", 0.1)])
def test_of_several_steps_or_another_optimizer_nothing_is_explained(digits, model, training):
    batch = digits.batch((0,))
    assert not has_law(seen_of(Client(model, training=training), batch, training=True))
    one_step = Client(model, training=LocalTraining("sgd", 0.1))
    assert has_law(seen_of(one_step, batch, training=True))
    assert not has_law(seen_of(one_step, batch, training=False)), "the attacker is not told the learning rate"


def test_noise_in_proportion_is_measured_by_what_it_was_added_to(digits, model):
    strong = Client(model, defenses=(build("defense", "gaussian", {"sigma": 1.0, "relative": True}),))
    batch = digits.batch((0,))
    seen = seen_of(strong, batch)
    count = sum(value.numel() for value in seen.tensors.values())
    found = float(ImageEvidence(seen)(batch.images[None], batch.labels[None], 0.01))
    assert found == pytest.approx(count / 2, rel=0.1), "by what was sent it would be half of that"


def test_what_has_no_law_is_not_explained(digits, model):
    for names in (("clip",), ("topk", "gaussian")):
        client = Client(model, defenses=tuple(build("defense", n, {}) for n in names))
        seen = seen_of(client, digits.batch((0,)))
        assert not has_law(seen)
        with pytest.raises(NotSupportedError, match="no likelihood here"):
            ImageEvidence(seen)


def test_without_a_label_the_one_that_explains_the_update_is_taken(digits, model):
    for row in range(4):
        batch = digits.batch((row,))
        evidence = ImageEvidence(seen_of(client_of(model, "gaussian"), batch))
        found = likeliest_images(evidence, batch.images, None, 10, lambda off: off.square().sum(1), 3, "test")
        right = int(batch.labels[0])
        wrong = likeliest_images(
            evidence, batch.images, (right + 1) % 10, 10, lambda off: off.square().sum(1), 3, "test"
        )
        told = likeliest_images(evidence, batch.images, right, 10, lambda off: off.square().sum(1), 3, "test")
        assert torch.equal(found, told)
        assert not torch.equal(found, wrong)


def test_a_reading_that_is_surely_right_stays(digits, model):
    batch = digits.batch((0,))
    evidence = ImageEvidence(seen_of(client_of(model, "none"), batch))
    start, label = digits.batch((1,)).images, int(batch.labels[0])
    free = likeliest_images(evidence, start, label, 10, lambda off: 0 * off.square().sum(1), 200, "t")
    held = likeliest_images(evidence, start, label, 10, lambda off: 1e9 * off.square().sum(1), 200, "t")
    assert float((held - start).norm()) < 0.05 * float((free - start).norm())
    outside = start.clone() * 3 - 1
    found = likeliest_images(evidence, outside, label, 10, lambda off: 1e9 * off.square().sum(1), 20, "t")
    assert 0 <= float(found.min()) <= float(found.max()) <= 1


@pytest.mark.parametrize("name", ["none", "gaussian", "sign", "topk"])
def test_refined_images_are_nearer_to_their_own_and_to_no_other(digits, model, tmp_path, name):
    rows = range(6)
    every = public_images(digits, digits, [tuple(rows)])
    public = PublicImages(every.images[:400], every.labels[:400], every.where, every.sha256)
    client = client_of(model, name)
    plain = fit(LtiImages(learner="kernel", mirrored=False), client, Selection("all"), public, 1, 0, tmp_path)
    assert isinstance(plain, LtiImages)
    refined = LtiImages(learner="kernel", mirrored=False, refine=150, inverter=plain.inverter)
    read, better, swapped = 0.0, 0.0, 0.0
    for row in rows:
        truth, other = digits.batch((row,)), digits.batch(((row + 1) % 6,))
        seen = seen_of(client, truth)
        one, two = plain(seen, stream(0, "a")), refined(seen, stream(0, "a"))
        assert one.images is not None
        assert two.images is not None
        assert 0 <= float(two.images.min()) <= float(two.images.max()) <= 1
        assert any("refined" in note for note in two.notes)
        read += float((one.images - truth.images).square().mean())
        better += float((two.images - truth.images).square().mean())
        swapped += float((two.images - other.images).square().mean())
    assert better < 0.95 * read
    assert swapped > 3 * better


def test_what_cannot_be_refined_says_so(digits, model, tmp_path):
    with pytest.raises(BadInputError, match="refine needs to know how far off readings are"):
        LtiImages(refine=10)
    every = public_images(digits, digits, [(0,)])
    public = PublicImages(every.images[:60], every.labels[:60], every.where, every.sha256)
    client = Client(model, defenses=(build("defense", "clip", {}),))
    found = fit(LtiImages(learner="kernel", refine=5), client, Selection("all"), public, 1, 0, tmp_path)
    answer = found(seen_of(client, digits.batch((0,))), stream(0, "a"))
    assert any("not refined" in note for note in answer.notes)
    manifest = Path(found.inverter) / "manifest.json"
    text = manifest.read_text(encoding="utf8")
    assert '"output": "head.weight"' in text or '"output":"head.weight"' in text
    manifest.write_text(text.replace("head.weight", "nothing", 1), encoding="utf8")
    with pytest.raises((BadInputError, NotSupportedError)):
        found(seen_of(client, digits.batch((0,))), stream(0, "a"))


def test_a_spread_that_is_no_law_is_refused(digits, model, tmp_path):
    every = public_images(digits, digits, [(0,)])
    public = PublicImages(every.images[:60], every.labels[:60], every.where, every.sha256)
    found = fit(LtiImages(learner="kernel", refine=2), Client(model), Selection("all"), public, 1, 0, tmp_path)
    weights = Path(found.inverter) / "inverter.safetensors"
    tensors = load_file(weights)
    for name, value in (("floor", 0.0), ("variances", -1.0)):
        save_file(tensors | {name: torch.full_like(tensors[name], value)}, weights)
        with pytest.raises(BadInputError, match="below zero"):
            found(seen_of(Client(model), digits.batch((0,))), stream(0, "a"))
