"""Scores of images against closed forms, and what of them reaches records, verdicts and the report."""

from __future__ import annotations

import base64
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from gradaudit.audit import run as audit
from gradaudit.audit.prepare import prepare
from gradaudit.audit.thresholds import parse
from gradaudit.case import parse_case
from gradaudit.data.png import png
from gradaudit.judge.images import ImageJudge
from gradaudit.metrics.images import MOST_DB, align_images, farthest, image_scores
from gradaudit.metrics.summary import interval, summarize
from gradaudit.record import ImageMarks, Pictures, Record
from gradaudit.report.render import render
from gradaudit.report.terminal import summary_tables
from gradaudit.types import ImageBatch, Reconstruction
from gradaudit.verdict.images import recovered
from gradaudit.verdict.run import verdict

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchmetrics")


def images(n: int, seed: int, shape: tuple[int, ...] = (1, 12, 10)) -> torch.Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


def test_what_was_found_keeps_the_labels_of_its_originals():
    batch = ImageBatch(images(3, 1), torch.tensor([1, 0, 2]))
    guessed = ImageJudge().guessed(batch, Reconstruction(images=batch.images[[2, 0]]))
    assert torch.equal(guessed.images, batch.images[[2, 0]])
    assert guessed.labels.tolist() == [2, 1]
    broken = torch.cat([batch.images[1:], torch.full_like(batch.images[:1], float("nan"))])
    assert ImageJudge().guessed(batch, Reconstruction(images=broken)).labels.tolist() == [0, 2], "NaN is no picture"


def test_scores_by_hand():
    ours = torch.zeros(3, 1, 8, 8)
    theirs = torch.stack([torch.zeros(1, 8, 8), torch.full((1, 8, 8), 0.1), torch.ones(1, 8, 8)])
    found = image_scores(ours, theirs)
    assert [s["mse"] for s in found] == pytest.approx([0.0, 0.01, 1.0])
    assert [s["psnr"] for s in found] == pytest.approx([MOST_DB, 20.0, 0.0])
    assert found[0]["ssim"] == pytest.approx(1.0)
    assert all(s["lpips"] is None for s in found)
    assert image_scores(ours[..., :5], theirs[..., :5])[0]["ssim"] is None, "no room for the window"


def test_ssim_is_that_of_the_formula():
    """Place by place, by Wang et al., section III.B, edges mirrored."""
    a, b = images(1, 0, (1, 9, 7)), images(1, 1, (1, 9, 7))
    x, y = (np.pad(i[0, 0].double().numpy(), 5, mode="reflect") for i in (a, b))
    weights = np.exp(-np.square(np.arange(-5, 6)) / (2 * 1.5**2))
    window = np.outer(weights, weights) / weights.sum() ** 2
    found = []
    for row in range(9):
        for column in range(7):
            here = (slice(row, row + 11), slice(column, column + 11))
            mx, my = (window * x[here]).sum(), (window * y[here]).sum()
            vx, vy = (window * (x[here] - mx) ** 2).sum(), (window * (y[here] - my) ** 2).sum()
            both = (window * (x[here] - mx) * (y[here] - my)).sum()
            found.append((2 * mx * my + 1e-4) * (2 * both + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    assert image_scores(a, b)[0]["ssim"] == pytest.approx(np.mean(found), abs=1e-4)


def test_images_are_matched_one_to_one_in_any_order():
    ours = images(4, 0)
    pairs = align_images(ours, ours[[2, 0, 3, 1]] + 0.01 * images(4, 1))
    assert all(p.scores["mse"] < 1e-4 for p in pairs)
    twice = align_images(ours, torch.stack([ours[0], ours[0], ours[0], ours[0]]))
    assert sum(p.scores["mse"] == 0 for p in twice) == 1, "one good guess serves one original"
    more = align_images(ours[:1], ours)
    assert more[0].scores["mse"] == 0


def test_leaving_images_out_never_pays():
    ours = images(3, 0)
    missing = align_images(ours, ours[:1])
    worst = [float((o - farthest(o)).square().mean()) for o in ours]
    assert [p.scores["mse"] for p in missing] == pytest.approx([0.0, *worst[1:]])
    assert missing[1].guess is None
    for seed in range(20):
        assert float((ours[1] - images(1, seed)[0].round()).square().mean()) <= worst[1]
    for nothing in (None, ours[:0], torch.full_like(ours, torch.nan)):
        assert [p.scores["mse"] for p in align_images(ours, nothing)] == pytest.approx(worst)
    out_of_range = align_images(ours, ours * 100)
    assert all(p.scores["mse"] <= 1 for p in out_of_range)


def test_the_png_is_the_image():
    for shape in ((1, 5, 6), (3, 5, 6)):
        image = (images(1, 0, shape)[0] * 255).round() / 255
        read = torch.from_numpy(np.asarray(Image.open(io.BytesIO(base64.b64decode(png(image))))).copy()) / 255
        torch.testing.assert_close(read if read.dim() == 2 else read.permute(2, 0, 1), image.squeeze(0))


@pytest.mark.parametrize("bad", ["not base64!", base64.b64encode(b"<svg onload=alert(1)>").decode(), '"><script>'])
def test_only_a_png_gets_into_a_page(bad):
    with pytest.raises(ValidationError):
        Pictures(case="c", setting="s", batch=0, attack="a", originals=(bad,), recovered=(None,))


def record(psnr: float, blind: float = 11.0, batch: int = 0, error: str | None = None) -> Record:
    def marks(db: float) -> ImageMarks:
        return ImageMarks(found=error is None, mse=10 ** (-db / 10), psnr=db, ssim=0.5)

    def scores(db: float) -> dict[str, float | None]:
        return {"mse": 10 ** (-db / 10), "psnr": db, "ssim": 0.5, "lpips": None}

    return Record(
        case="c", setting="plain", batch=batch, attack="ig", scores=scores(psnr), baseline=scores(blind),
        batch_size=1, seconds=1.0, error=error, images=(marks(psnr),), images_baseline=(marks(blind),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("records", "level"),
    [
        ([record(25.0)], "leaks"),
        ([record(25.0, blind=20.0)], "partly"),  # the blind guess can nearly be recognized as well
        ([record(22.0, blind=20.0)], "not shown"),
        ([record(15.0)], "partly"),
        ([record(12.0)], "not shown"),
        ([record(11.0, batch=n) for n in range(4)] + [record(21.0, batch=4)], "leaks"),
        ([record(25.0, error="broken")], "inconclusive"),
    ],
)
def test_verdicts(records, level):
    assert verdict(summarize(records), records).level == level


def test_the_worst_batch_of_an_error_is_the_lowest():
    assert interval([0.1, 0.3], low_is_worst=True).worst == pytest.approx(0.1)
    summary = summarize([record(25.0), record(15.0, batch=1)])[0]
    assert summary.scores["mse"].worst == pytest.approx(10**-2.5)
    assert summary.scores["psnr"].worst == pytest.approx(25.0)
    assert summary.scores["lpips"].mean is None
    limit = parse(["mse<0.03"])[0]
    assert limit.crossed(summary)
    assert not parse(["rougeL>1"])[0].crossed(summary), "a score that images do not have"
    assert summary_tables([summary])[0].row_count == 1


def test_recovered_counts_what_can_be_recognized():
    assert [recovered(record(db)) for db in (19.9, 20.1)] == [0, 1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("run")
    case = {
        "task": "image-classification",
        "model": "lenet",
        "data": {"batches": 2, "batch_size": 2},
        "knowledge": {"labels": True},
        "attack": {"name": "ig", "steps": 5},
    }
    ready = prepare(parse_case(case), folder, torch.device("cpu"))
    list(audit.run(ready, folder))
    return folder


def test_the_report_shows_images_only_when_asked_for(run: Path):
    pixels = re.findall(r'"(iVBOR[^"]+)"', (run / "images.jsonl").read_text())
    assert len(pixels) == 8
    hidden = render(run).read_text()
    assert "data:image" not in hidden
    assert not [p for p in pixels if p in hidden]
    assert "none of their pixels is in this file" in hidden
    assert hidden.count('class="blank"') == 8
    shown = render(run, show_text=True)
    assert shown.stat().st_mode & 0o777 == 0o600
    text = shown.read_text()
    assert all(f'src="data:image/png;base64,{p}"' in text for p in pixels)
    linked = set(re.findall(r'(?:src|href)="([^"]{5})', text))
    assert {"data:"} == {one for one in linked if not one.startswith("#")}, "nothing from outside"
    assert "how many images the client trained on" in text
    assert "<dt>Images read back recognizably</dt>" in text
    (run / "images.jsonl").rename(run / "elsewhere")
    try:
        assert "The images cannot be shown" in render(run, show_text=True).read_text()
    finally:
        (run / "elsewhere").rename(run / "images.jsonl")


def test_a_failed_attack_scores_worst_and_keeps_its_reason():
    batch = ImageBatch(images(2, 0), torch.tensor([0, 1]))
    nothing = ImageJudge().judge(batch, Reconstruction())
    assert [m.found for m in nothing.images] == [False, False]
    assert nothing.recovered == (None, None)
    assert not nothing.solved
    assert ImageJudge().judge(batch, Reconstruction(images=batch.images)).solved
    assert math.isclose(nothing.scores["mse"] or 0, float((batch.images - farthest(batch.images)).square().mean()),
                        rel_tol=1e-5)  # fmt: skip
