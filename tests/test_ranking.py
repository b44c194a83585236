"""Words from compressed gradients: the batch's stand out, and pure noise has none."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import tiny_models
from gradaudit.client.client import Client
from gradaudit.data.spec import DataSpec
from gradaudit.data.text import SAMPLE, load_rows, make_batch
from gradaudit.leakage.rowspace.ranking import accepted, expected_by_chance, rank_words, shrunk
from gradaudit.leakage.rowspace.subspace import stack
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.registry import build
from gradaudit.types import Given

pytestmark = pytest.mark.minilm


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sign", {}),
        ("topk", {"keep": 0.1}),
        ("random-pruning", {"rate": 0.9}),
        ("gaussian", {"sigma": 0.5, "relative": True}),
    ],
)
def test_the_words_stand_out_and_little_else_does(minilm, name: str, fields: dict):
    rows = load_rows(DataSpec(path=str(SAMPLE), label="label"), Path.cwd())
    assert rows.labels is not None
    batch = make_batch(minilm, rows.texts[4:5], rows.labels[4:5])
    client = Client(minilm, defenses=(build("defense", name, fields),))
    seen = tiny_models.seen_of(client, batch, "0:q,k,v", Given(), 0)
    stacked, _ = stack(seen, 0)
    assert stacked is not None
    found = [word.token for word in rank_words(minilm, stacked, 32, 0.05)]
    right = set(batch.sequences()[0]) - minilm.special.ids
    assert len(right & set(found)) >= 0.9 * len(right)
    assert len(set(found) - right) <= 2


def test_behind_the_words_taken_come_those_with_the_largest_share_in_the_span(minilm, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    likeliest_words = importlib.import_module("word_evidence").likeliest_words
    rows = load_rows(DataSpec(path=str(SAMPLE), label="label"), Path.cwd())
    assert rows.labels is not None
    batch = make_batch(minilm, rows.texts[:4], rows.labels[:4])
    client = Client(minilm, defenses=(build("defense", "topk", {"keep": 0.01}),))
    seen = tiny_models.seen_of(client, batch, "0:q,k,v", Given(), 0)
    stacked, _ = stack(seen, 0)
    assert stacked is not None
    right = {token for ids in batch.sequences() for token in ids} - minilm.special.ids
    taken = [word.token for word in rank_words(minilm, stacked, 2 * len(right), 0.1)]
    found = likeliest_words(minilm, stacked, 2 * len(right), 4)
    assert found[: len(taken)] == taken
    assert len(set(found)) == len(found) == 2 * len(right)
    assert not set(found) & minilm.special.ids
    assert len(right & set(found)) > len(right & set(taken))


def test_pure_noise_holds_no_words(minilm):
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        noise = torch.randn(1152, 384, generator=rng, dtype=torch.double)
        assert rank_words(minilm, noise, 4, 0.05) == []


def test_the_count_expected_by_chance_is_that_of_an_exponential_tail():
    """For exponential scores the highest has V exp(-max) above it on average: an exponential number of mean 1."""
    rng = torch.Generator().manual_seed(2)
    drawn, closed = [], []
    for _ in range(200):
        scores = -torch.rand(20000, generator=rng, dtype=torch.double).log()
        drawn.append(expected_by_chance(scores))
        closed.append(20000 * float((-scores.max()).exp()))
    ratio = torch.tensor(drawn).log() - torch.tensor(closed).log()
    assert float(ratio.abs().median()) < 0.4  # the rate of a thousand excesses is known to 5%, over seven of them
    assert 0.7 < sum(drawn) / 200 < 1.4


def test_words_of_the_batch_leave_the_count_of_the_others_almost_as_it_was():
    scores = -torch.rand(20000, generator=torch.Generator().manual_seed(3), dtype=torch.double).log()
    alone = expected_by_chance(torch.cat([scores, torch.tensor([25.0])]))
    among = expected_by_chance(torch.cat([scores, torch.full((100,), 24.0), torch.tensor([25.0])]))
    assert alone < 1e-5
    assert among < 1e-3


@pytest.mark.parametrize(
    ("expected", "level", "taken"),
    [
        ([0.0, 0.0, 0.0], 0.05, 3),
        ([0.2], 0.1, 0),
        ([0.0, 0.2, 1.0], 0.1, 2),
        ([0.2, 0.0, 0.0, 1.0], 0.1, 3),  # a doubtful word before sure ones is made up for
        ([], 0.1, 0),
    ],
)
def test_forward_stop_takes_the_longest_run_whose_mean_is_low_enough(expected: list[float], level: float, taken: int):
    assert accepted(expected, level) == taken


def test_shrinking_keeps_what_stands_above_the_noise():
    rng = torch.Generator().manual_seed(1)
    strong = torch.nn.functional.normalize(torch.randn(2, 60, generator=rng, dtype=torch.double), dim=1)
    matrix = torch.randn(200, 2, generator=rng, dtype=torch.double) @ strong * 5
    matrix = matrix + 0.05 * torch.randn(200, 60, generator=rng, dtype=torch.double)
    kept = shrunk(matrix)
    assert float((strong @ torch.linalg.pinv(kept[:2]) @ kept[:2] - strong).norm()) < 0.05
    assert float(kept[2:].norm()) < 0.3 * float(kept[:2].norm())
