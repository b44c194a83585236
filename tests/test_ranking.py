"""Words from compressed gradients: the batch's stand out, and pure noise has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradaudit.client import Client
from gradaudit.data.source import SAMPLE, DataSpec, load_rows, make_batch
from gradaudit.leakage.ranking import rank_words, shrunk
from gradaudit.leakage.subspace import stack
from gradaudit.models.base import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given

pytestmark = pytest.mark.minilm


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


@pytest.mark.parametrize(
    ("name", "fields"), [("sign", {}), ("topk", {"keep": 0.1}), ("gaussian", {"sigma": 0.5, "relative": True})]
)
def test_the_words_stand_out_and_little_else_does(minilm, name: str, fields: dict):
    rows = load_rows(DataSpec(path=str(SAMPLE), label="label"), Path.cwd())
    assert rows.labels is not None
    batch = make_batch(minilm, rows.texts[4:5], rows.labels[4:5])
    client = Client(minilm, defenses=(build("defense", name, fields),))
    seen = client.observe(batch, Selection("0:q,k,v"), Given(), stream(0, "client"))
    stacked, _ = stack(seen, 0)
    assert stacked is not None
    found = [word.token for word in rank_words(minilm, stacked, 32, 9.0)]
    right = set(batch.sequences()[0]) - minilm.special.ids
    assert len(right & set(found)) >= 0.9 * len(right)
    assert len(set(found) - right) <= 2


def test_pure_noise_holds_no_words(minilm):
    noise = torch.randn(1152, 384, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    assert rank_words(minilm, noise, 32, 9.0) == []


def test_shrinking_keeps_what_stands_above_the_noise():
    rng = torch.Generator().manual_seed(1)
    strong = torch.nn.functional.normalize(torch.randn(2, 60, generator=rng, dtype=torch.double), dim=1)
    matrix = torch.randn(200, 2, generator=rng, dtype=torch.double) @ strong * 5
    matrix = matrix + 0.05 * torch.randn(200, 60, generator=rng, dtype=torch.double)
    kept = shrunk(matrix)
    assert float((strong @ torch.linalg.pinv(kept[:2]) @ kept[:2] - strong).norm()) < 0.05
    assert float(kept[2:].norm()) < 0.3 * float(kept[:2].norm())
