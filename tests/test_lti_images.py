"""LTI for images: simulated updates are the client's own, what is learned reads them, and nothing else is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import ks_2samp
from typer.testing import CliRunner

from gradaudit.attacks.lti_images import LtiImages
from gradaudit.audit.fitting import fit
from gradaudit.bundles.bundle import save_bundle
from gradaudit.bundles.examine import examine
from gradaudit.cli import app
from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of, observation
from gradaudit.client.simulate_images import ImageSimulation
from gradaudit.data.images import ImageRows, load_images, public_images
from gradaudit.data.png import png
from gradaudit.data.spec import DataSpec
from gradaudit.errors import BadInputError, MissingKnowledgeError, NotSupportedError
from gradaudit.judge.images import ImageJudge
from gradaudit.learned.images.inverter import load_image_inverter
from gradaudit.learned.images.kernel import Kernel, distances, fit_kernel
from gradaudit.learned.images.network import in_slots
from gradaudit.models.images import ImageModel, load_image_model
from gradaudit.models.spec import ModelSpec
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given, ImageBatch, LocalTraining, Observation, PublicImages

pytest.importorskip("sklearn")
pytest.importorskip("torchmetrics")
pytest.importorskip("PIL")

ALL = Selection("all")
AUDITED = tuple(range(20))
QUICK = {"width": 128, "hidden": 1, "epochs": 12, "batch": 64, "mirrored": False}


@pytest.fixture(scope="module")
def digits() -> ImageRows:
    return load_images(DataSpec(source="digits"), Path())


@pytest.fixture(scope="module")
def public(digits) -> PublicImages:
    every = public_images(digits, digits, [AUDITED])
    return PublicImages(every.images[:600], every.labels[:600], every.where, every.sha256)


@pytest.fixture(scope="module")
def model() -> ImageModel:
    return load_image_model(ModelSpec("lenet", "image-classification", 10, 0, image=(1, 8, 8)))


def seen_of(client: Client, batch: ImageBatch, given: Given | None = None) -> Observation[Any]:
    update = client.update(batch, stream(0, "client"))
    return observation(client.model, update, ALL, knowledge_of(batch, update, given or Given()), None)


def fitted(attack: LtiImages, client: Client, public: PublicImages, folder: Path, size: int = 1) -> LtiImages:
    found = fit(attack, client, ALL, public, size, 0, folder)
    assert isinstance(found, LtiImages)
    return found


def errors(attack: LtiImages, client: Client, digits: ImageRows, size: int = 1) -> tuple[float, float]:
    """Mean squared error on audited images, and of the same answers held against other images (swap)."""
    rows = [AUDITED[n : n + size] for n in range(0, len(AUDITED) - size + 1, size)]
    found = [attack(seen_of(client, digits.batch(row)), stream(0, "attack")) for row in rows]
    own = [ImageJudge().judge(digits.batch(row), f).scores["mse"] for row, f in zip(rows, found, strict=True)]
    swapped = [ImageJudge().judge(digits.batch(row), f).scores["mse"] for row, f in zip(rows[1:], found, strict=False)]
    return sum(x or 0.0 for x in own) / len(own), sum(x or 0.0 for x in swapped) / len(swapped)


def blind(digits: ImageRows, public: PublicImages) -> float:
    mean = public.images.mean(0)
    return float((digits.batch(AUDITED).images - mean).square().mean())


@pytest.mark.parametrize(
    "client",
    [
        {},
        {"defenses": ("sign",)},
        {"defenses": ("topk", "clip")},
        {"freeze": ("head",)},
        {"training": LocalTraining("sgd", 0.1, 2)},
        {"clients": 2},
    ],
    ids=str,
)
def test_simulated_updates_are_the_clients_own(digits, model, client):
    how = dict(client)
    how["defenses"] = tuple(build("defense", name, {}) for name in how.pop("defenses", ()))
    simulation = ImageSimulation(Client(model, **how), ALL)
    batches = [digits.batch((n, n + 1)) for n in range(0, 6, 2)]
    found = simulation(
        torch.stack([b.images for b in batches]), torch.stack([b.labels for b in batches]), stream(0, "s")
    )
    for row, batch in zip(found, batches, strict=True):
        update = simulation.client.update(batch, stream(1, "alone")).tensors
        alone = torch.cat([update[v.parameter].flatten() for v in simulation.views.values()])
        same = (row - alone).abs() < 1e-5 * alone.abs().max()
        assert float(same.float().mean()) > 0.999, "a sign of what is zero may fall to rounding"
    assert not simulation.random


def test_simulated_noise_is_fresh_and_has_the_clients_law(digits, model):
    noise = (build("defense", "gaussian", {"sigma": 0.5}),)
    simulation = ImageSimulation(Client(model, defenses=noise), ALL)
    batch = digits.batch((0,))
    images, labels = batch.images[None].repeat(40, 1, 1, 1, 1), batch.labels[None].repeat(40, 1)
    one, other = (simulation(images, labels, stream(n, "s")) for n in (0, 1))
    assert simulation.random
    assert not torch.equal(one, other)
    clean = ImageSimulation(Client(model), ALL)(images[:1], labels[:1], stream(0, "s"))
    draws = (one - clean).flatten()[:20_000].numpy()
    right, wrong = (torch.randn(20_000, generator=stream(2, "n")).mul(s).numpy() for s in (0.5, 0.75))
    assert ks_2samp(draws, right).pvalue > 1e-3
    assert ks_2samp(draws, wrong).pvalue < 1e-9


@pytest.mark.parametrize("learner", ["network", "kernel"])
@pytest.mark.parametrize("defense", [None, "sign"])
def test_it_reads_far_better_than_blind_and_other_images_at_chance(digits, public, model, tmp_path, learner, defense):
    defenses = () if defense is None else (build("defense", defense, {}),)
    client = Client(model, defenses=defenses)
    attack = fitted(LtiImages(learner=learner, **QUICK), client, public, tmp_path / "inverter")
    own, swapped = errors(attack, client, digits)
    chance = blind(digits, public)
    assert own < 0.6 * chance
    assert swapped > chance
    assert json.loads((tmp_path / "inverter" / "manifest.json").read_text())["mse"] < chance


def test_two_images_of_an_update_come_in_any_order(digits, public, model, tmp_path):
    client = Client(model)
    attack = fitted(LtiImages(**(QUICK | {"epochs": 30})), client, public, tmp_path / "inverter", size=2)
    own, _ = errors(attack, client, digits, size=2)
    assert own < 0.9 * blind(digits, public)
    with pytest.raises(NotSupportedError, match="one image an update"):
        fitted(LtiImages(learner="kernel"), client, public, tmp_path / "kernel", size=2)


def test_slots_follow_the_images():
    images = torch.rand(3, 4, 1, 5, 5, generator=stream(0, "slots"))
    shuffled = images[:, [2, 0, 3, 1]]
    assert torch.equal(in_slots(shuffled, images), shuffled)


def test_a_kernel_solves_its_normal_equations():
    draw = stream(0, "kernel")
    numbers, images = torch.randn(30, 7, generator=draw), torch.rand(30, 1, 4, 4, generator=draw)
    kernel, _ = fit_kernel(numbers, images, numbers[:5], images[:5], ridges=(0.05,))
    near = torch.exp(-kernel.sharpness.double() * torch.cdist(numbers.double(), numbers.double()).square())
    wanted = torch.linalg.solve(near + 0.05 * torch.eye(30).double(), (images - images.mean(0)).flatten(1).double())
    assert torch.allclose(kernel.coefficients.double(), wanted, atol=1e-4)
    assert torch.allclose(distances(numbers, numbers), torch.cdist(numbers, numbers).double().square(), atol=1e-3)
    assert isinstance(kernel, Kernel)


@pytest.mark.parametrize("learner", ["network", "kernel"])
def test_a_saved_inverter_reads_the_same_and_refuses_what_it_was_not_made_for(digits, public, model, tmp_path, learner):
    client = Client(model)
    attack = fitted(LtiImages(learner=learner, **(QUICK | {"epochs": 1})), client, public, tmp_path / "inverter")
    batch = digits.batch((0,))
    seen = seen_of(client, batch)
    again = LtiImages(inverter=str(tmp_path / "inverter"))
    first, second = (a(seen, stream(0, "attack")).images for a in (attack, again))
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    other = Client(load_image_model(ModelSpec("lenet", "image-classification", 10, 1, image=(1, 8, 8))))
    signed = Client(model, defenses=(build("defense", "sign", {}),))
    for misfit, said in (
        (seen_of(other, batch), "made for other weights"),
        (seen_of(signed, batch), "client with defenses none, not sign"),
        (seen_of(client, digits.batch((0, 1))), "client with batch size 1, not 2"),
        (seen_of(replace(client, freeze=("head",)), batch), "another selection of tensors"),
    ):
        with pytest.raises(NotSupportedError, match=said):
            again(misfit, stream(0, "attack"))
    path = tmp_path / "inverter" / "inverter.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInputError, match="truncated or not a safetensors file"):
        load_image_inverter(tmp_path / "inverter")
    path.write_bytes(whole)
    tensors = load_file(path)
    name = next(iter(sorted(tensors)))
    save_file(tensors | {name: torch.cat([tensors[name], tensors[name]])}, path)
    with pytest.raises(BadInputError, match="does not hold the network"):
        load_image_inverter(tmp_path / "inverter")


def test_a_saved_inverter_reads_a_bundle_as_the_update_it_was_made_of(digits, public, model, tmp_path):
    client, batch = Client(model), digits.batch((0,))
    attack = fitted(LtiImages(learner="kernel"), client, public, tmp_path / "inverter")
    direct = attack(seen_of(client, batch), stream(0, "attack")).images
    how = [f"inverter={tmp_path / 'inverter'}"]
    other = Client(load_image_model(ModelSpec("lenet", "image-classification", 10, 1, image=(1, 8, 8))))
    for sender, folder in ((client, tmp_path / "own"), (other, tmp_path / "other")):
        update = sender.update(batch, stream(0, "client"))
        save_bundle(folder, sender.model, update, knowledge_of(batch, update, Given()))
    found = examine(tmp_path / "own", "lti-images", how, "all", None, 0, torch.device("cpu"))
    assert direct is not None
    assert found.images == (png(direct[0]),)
    with pytest.raises(NotSupportedError, match="made for other weights"):
        examine(tmp_path / "other", "lti-images", how, "all", None, 0, torch.device("cpu"))


def test_run_fits_it_by_itself_and_fit_makes_one_for_later(tmp_path):
    case = tmp_path / "case.toml"
    table = '[attack]\nname = "lti-images"\nlearner = "kernel"\nmirrored = false\n'
    case.write_text(f'model = "lenet"\ntask = "image-classification"\n[data]\nbatches = 2\n{table}')
    checked = CliRunner().invoke(app, ["check", str(case), "--json"])
    assert json.loads(checked.stdout)["estimate"]["learning"] > 0
    told = CliRunner().invoke(app, ["run", str(case), "--out", str(tmp_path / "out"), "--json"])
    assert told.exit_code == 0, told.output
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert lines[0]["scores"]["mse"] < lines[0]["baseline"]["mse"] / 2
    assert "images" in lines[0]["knowledge"]["public"]
    made = CliRunner().invoke(app, ["fit", str(case), "--out", str(tmp_path / "inverter"), "--json"])
    assert made.exit_code == 0, made.output
    case.write_text(case.read_text().replace('learner = "kernel"', f'inverter = "{tmp_path / "inverter"}"'))
    again = CliRunner().invoke(app, ["run", str(case), "--out", str(tmp_path / "again"), "--json"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout.splitlines()[0])["scores"]["mse"] < lines[0]["baseline"]["mse"] / 2
    weights = tmp_path / "inverter" / "inverter.safetensors"
    save_file({name: 1.01 * value for name, value in load_file(weights).items()}, weights)
    other = CliRunner().invoke(app, ["run", str(case), "--out", str(tmp_path / "again")])
    assert isinstance(other.exception, BadInputError)
    assert "the inverter has changed" in str(other.exception), "records of two inverters are not mixed"


def test_an_inverter_is_not_audited_on_what_it_was_fitted_to(tmp_path):
    case, inverter = tmp_path / "case.toml", tmp_path / "inverter"
    head = 'model = "lenet"\ntask = "image-classification"\n[data]\nbatches = 2\n[attack]\nname = "lti-images"\n'
    case.write_text(head + 'learner = "kernel"\nmirrored = false\n')
    made = CliRunner().invoke(app, ["fit", str(case), "--out", str(inverter)])
    assert made.exit_code == 0
    assert '(in a case: [attack] name = "lti-images", inverter =' in " ".join(made.stdout.split())
    case.write_text(head.replace("batches = 2", "batches = 9") + f'inverter = "{inverter}"\n')
    told = CliRunner().invoke(app, ["run", str(case), "--out", str(tmp_path / "out")])
    assert isinstance(told.exception, BadInputError)
    assert "was fitted to 7 of the 9 audited rows" in str(told.exception)


def test_a_kernel_of_several_images_or_of_another_shape_is_refused(digits, public, model, tmp_path):
    client = Client(model)
    attack = fitted(LtiImages(learner="kernel", **QUICK), client, public, tmp_path / "inverter")
    manifest = tmp_path / "inverter" / "manifest.json"
    about = json.loads(manifest.read_text())
    inverter = load_image_inverter(tmp_path / "inverter")
    other = replace(inverter, manifest=inverter.manifest.model_copy(update={"image": (1, 4, 16)}))
    with pytest.raises(NotSupportedError, match="reads images of"):
        other.images(seen_of(client, digits.batch((0,))))
    manifest.write_text(json.dumps(about | {"target": about["target"] | {"batch_size": 2}}))
    with pytest.raises(BadInputError, match="one image an update"):
        attack(seen_of(client, digits.batch((0, 1))), stream(0, "attack"))


@pytest.mark.parametrize("fact", ["batch_size", "training", "dropout", "defenses"])
def test_nothing_is_learned_through_what_the_attacker_is_not_given(tmp_path, fact):
    case = tmp_path / "case.toml"
    case.write_text(
        'model = "lenet"\ntask = "image-classification"\n[attack]\nname = "lti-images"\nlearner = "kernel"\n'
        f'[knowledge]\n{fact} = false\n[[defense]]\nname = "sign"\n'
    )
    for command in ("run", "fit"):
        told = CliRunner().invoke(app, [command, str(case), "--out", str(tmp_path / command)])
        assert isinstance(told.exception, MissingKnowledgeError)
        assert fact.replace("_", " ") in str(told.exception)


def test_too_few_images_are_refused(digits, model, tmp_path):
    every = public_images(digits, digits, [AUDITED])
    few = PublicImages(every.images[:1], every.labels[:1], every.where, every.sha256)
    with pytest.raises(BadInputError, match=r"\[public\] has 1 images"):
        fitted(LtiImages(**QUICK), Client(model), few, tmp_path)
    with pytest.raises(NotSupportedError, match="has no inverter"):
        LtiImages()(seen_of(Client(model), digits.batch((0,))), stream(0, "attack"))
    with pytest.raises(BadInputError, match="learner must be"):
        LtiImages(learner="tree")
