"""What a defense costs a model of images: learned through the client, tested on images apart, drawn over what leaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gradaudit.sweeps.utility
from gradaudit.audit.prepare import prepare
from gradaudit.case import parse_case
from gradaudit.cli import app
from gradaudit.client.client import Client
from gradaudit.client.mean_update import mean_update
from gradaudit.data.images import ImageRows, load_images
from gradaudit.data.rows import bind
from gradaudit.data.spec import DataSpec
from gradaudit.models.images import load_image_model
from gradaudit.models.spec import ModelSpec
from gradaudit.record import ImageMarks, Interval, Record, Summary
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.sweeps.frontier import frontiers
from gradaudit.sweeps.measure import MEASURES
from gradaudit.sweeps.result import Result, SweepPoint
from gradaudit.sweeps.utility import Utility, UtilityTable, utility
from gradaudit.types import ImageBatch, LocalTraining

pytest.importorskip("sklearn")
pytest.importorskip("torchmetrics")

CPU = torch.device("cpu")
SHORT = UtilityTable(steps=80, batch_size=16, learning_rate=5e-3, test_rows=200)


def measured(how: UtilityTable = SHORT, **over: Any) -> Utility:
    base = {"task": "image-classification", "model": "resnet", "attack": {"name": "blind"}}
    ready = prepare(parse_case(base | over), Path.cwd(), CPU)
    return utility(ready.case, how, ready.model, ready.rows)


def test_digits_are_learned_and_noise_costs_it():
    plain = measured()
    assert plain.before < 30
    assert plain.accuracy > 60
    assert plain.mcc > 50
    assert (plain.train_rows, plain.test_rows, plain.clients) == (1597, 200, 16)
    assert measured(defense=[{"name": "gaussian", "sigma": 10.0}]).accuracy < plain.accuracy - 30


def model_of() -> Any:
    return load_image_model(ModelSpec("resnet", "image-classification", 10, 0, image=(1, 8, 8)))


@pytest.mark.parametrize("clients", [2, 8])
@pytest.mark.parametrize(
    "table",
    [
        None,
        ("sign", {}),
        ("topk", {"keep": 0.05}),
        ("clip", {"norm": 0.1}),
        ("dp-sgd", {"clip": 0.1, "noise_multiplier": 0.0, "poisson": False}),
    ],
)
@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("sgd", 0.1, 2)])
def test_the_mean_update_is_the_mean_of_the_clients(clients, table, training):
    if table is not None:
        pytest.importorskip("opacus")
    model, rng = model_of(), stream(0, "images")
    batch = ImageBatch(torch.rand(8, 1, 8, 8, generator=rng), torch.randint(10, (8,), generator=rng))
    client = Client(model, training, defenses=() if table is None else (build("defense", *table),))
    each = [
        client.update(batch.take(rows), stream(n, "own")).tensors
        for n, rows in enumerate(torch.arange(8).chunk(clients))
    ]
    found = mean_update(client, batch, clients, stream(1, "mean")).tensors
    for name, value in found.items():
        wanted = torch.stack([one[name] for one in each]).mean(0)
        # a number that is zero but for rounding may have another sign, or lie at another side of a threshold
        far = (value - wanted).abs() > 1e-4 * max(float(wanted.abs().max()), 1e-6)
        assert float(far.float().mean()) < (0.03 if table is not None else 1e-9), name


def test_a_copy_of_a_tested_image_is_not_trained_on():
    digits = load_images(DataSpec(), Path.cwd())
    twice = torch.cat([digits.pixels[:50], digits.pixels[:50]])
    rows = ImageRows(twice, digits.labels[:50] * 2, digits.classes, "twice", "0" * 64)
    labeled = bind(model_of(), rows)
    others = {tuple(p.flatten().tolist()) for p in twice[[3, 7]]}
    left = labeled.disjoint(range(100), [3, 57])
    assert left == [n for n in range(100) if tuple(twice[n].flatten().tolist()) not in others]
    assert not {3, 7, 53, 57} & set(left)


def test_everything_that_decides_it_is_in_its_name():
    base = {"task": "image-classification", "model": "resnet", "attack": {"name": "blind"}}
    cases = [
        base,
        base | {"model": "lenet"},
        base | {"seed": 1},
        base | {"defense": [{"name": "sign"}]},
        base | {"defense": [{"name": "sign"}], "data": {"batch_size": 2}},
    ]
    names = set()
    for case in cases:
        ready = prepare(parse_case(case), Path.cwd(), CPU)
        names.add(gradaudit.sweeps.utility._identity(ready.case, SHORT, ready.model, ready.rows))
    assert len(names) == len(cases)


def test_a_sweep_of_images_has_its_costs_and_its_frontier(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(
        'task = "image-classification"\nmodel = "lenet"\n[data]\nbatches = 2\n'
        '[attack]\nname = "ig"\nsteps = 300\nrestarts = 1\n'
        "[utility]\nsteps = 3\nbatch_size = 4\ntest_rows = 60\n"
        '[axes]\ndefense = [[], [{name = "gaussian", sigma = 100.0}], [{name = "dp-sgd", poisson = false}]]\n'
    )
    told = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    assert "mcc" in told.stdout
    header, first = (tmp_path / "out" / "sweep.csv").read_text().splitlines()[:2]
    assert dict(zip(header.split(","), first.split(","), strict=True))["accuracy"] != ""
    page = (tmp_path / "out" / "frontier.html").read_text()
    assert "% explained" in page
    assert "ROUGE" not in page
    assert "data:image" not in page, "private pixels without being asked for"
    assert "of the blind error explained" in (tmp_path / "out" / "frontier-1.svg").read_text()
    shown = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out"), "--show-text"])
    assert shown.exit_code == 0, shown.output
    place = tmp_path / "out" / "frontier.html"
    assert place.read_text().count("data:image/png;base64,") >= 2
    assert place.stat().st_mode & 0o077 == 0, "others may see the private images"


def result(error: float, mcc: float, attack: str = "ig", psnr: float = 10.0, sigma: float = 0.0) -> Result:
    """Two images of an attack with a mean squared error, blind guessing having 0.1 and 10 dB."""
    defense = [{"name": "gaussian", "sigma": sigma}] if sigma else []
    task = {"task": "image-classification", "model": "lenet"}
    case = parse_case(task | {"attack": {"name": attack}, "defense": defense})
    marks = ImageMarks(found=True, mse=error, psnr=psnr, ssim=0.1, lpips=None)
    blind = ImageMarks(found=True, mse=0.1, psnr=10.0, ssim=0.1, lpips=None)
    record = Record(
        case="c", setting="s", batch=0, attack=attack, scores={"mse": error}, baseline={"mse": 0.1}, batch_size=2,
        seconds=1.0, images=(marks, marks), images_baseline=(blind, blind),
    )  # fmt: skip
    told = Interval(mean=error, low=error - 0.01, high=error + 0.01, worst=error - 0.02, n=2)
    summary = Summary(
        case="c", setting="s", attack=attack, n=2, failed=0, scores={"mse": told},
        baseline={"mse": Interval(mean=0.1, n=2)}, seconds=1.0, flags=(),
    )  # fmt: skip
    cost = Utility(80.0, 80.0, mcc, mcc - 5.0, mcc + 5.0, 50.0, 100, 50, None, 1e-3, 16, 1.0)
    words = f"gaussian sigma={sigma}" if sigma else "none"
    return Result(SweepPoint({"defense": words}, case), summary, (record,), utility=cost)


def test_the_leak_is_the_share_of_the_blind_error_that_is_explained():
    (found,) = frontiers([result(0.06, 70), result(0.02, 70, "gigip")])
    (point,) = found.points
    assert point.measure is MEASURES["images"]
    assert (point.attack, point.blind) == ("gigip", 0.0), "the lower error is the stronger attack"
    assert point.leak.mean == pytest.approx(80)
    assert (point.leak.low, point.leak.high) == (pytest.approx(70), pytest.approx(90))
    assert point.leak.worst == pytest.approx(100)
    assert point.worst is not None
    assert point.worst[0].attack == "gigip"


def test_what_can_be_recognized_is_not_silent():
    quiet, seen = result(0.11, 70), result(0.11, 70, psnr=25.0)
    (one,) = frontiers([quiet])
    assert one.chosen is not None
    assert one.points[0].exact == 0
    (other,) = frontiers([seen])
    assert other.points[0].exact == 100
    assert other.chosen is None


def test_a_tenth_of_the_error_is_silence_and_more_is_not():
    (found,) = frontiers([result(0.105, 60, sigma=0.1), result(0.095, 70)])
    assert {p.client: p.silent for p in found.points} == {"gaussian sigma=0.1": True, "none": False}
    assert found.chosen is not None
    assert found.chosen.client == "gaussian sigma=0.1"
    assert "% explained" in frontiers([result(0.02, 70)])[0].reason
