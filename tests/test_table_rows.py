"""Rows with their masks from the gradients of the embedding tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradaudit.attacks.decode import TOLD_BY_TABLES, Decode
from gradaudit.client.client import Client
from gradaudit.leakage.decoding import table_rows
from gradaudit.leakage.decoding.rows import MaskedInputs
from gradaudit.leakage.decoding.table_rows import rows_of_tables
from gradaudit.leakage.rowspace.embedding_rows import words_of
from gradaudit.leakage.rowspace.subspace import span
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.streams import stream
from made_data import sample_batch
from tiny_models import seen_of

WIDTH, RATE = 256, 0.1


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


def made(stands: list[tuple[int, int]], seed: int = 0, rate: float = RATE) -> SimpleNamespace:
    """Return both tables' gradients of a masked LayerNorm by autograd, of words at positions, and the masks."""
    rng = torch.Generator().manual_seed(seed)
    words, places = (torch.randn(n, WIDTH, generator=rng).requires_grad_() for n in (8, 6))
    weight, bias = torch.randn(2, WIDTH, generator=rng)
    which, where = (torch.tensor(part) for part in zip(*stands, strict=True))
    kept = torch.rand(len(stands), WIDTH, generator=rng) >= rate
    entering = torch.nn.functional.layer_norm(words[which] + places[where], (WIDTH,), weight, bias) * kept / (1 - rate)
    (entering * torch.randn(entering.shape, generator=rng)).sum().backward()
    assert words.grad is not None
    assert places.grad is not None
    parts = SimpleNamespace(words=words.detach(), positions=places.detach())
    inputs: Any = SimpleNamespace(model=SimpleNamespace(first_input_parts=lambda: parts))
    return SimpleNamespace(inputs=inputs, words=words.grad, places=places.grad, kept=kept)


def told(
    case: SimpleNamespace, words: Tensor | None = None, rate: float | None = RATE
) -> dict[tuple[int, int], Tensor]:
    ids = torch.where(case.words.any(1))[0]
    rows = (case.words if words is None else words)[ids].double()
    near = table_rows._ROUNDED * torch.finfo(torch.float32).eps
    found = table_rows._Tables(case.inputs, ids, rows, case.places.double(), near, rate)
    return {(int(ids[word]), at): kept for word, at, kept in found.told(torch.Generator().manual_seed(1))}


def test_a_word_that_stands_once_tells_its_place_and_its_mask():
    stands = [(0, 1), (1, 0), (2, 3), (3, 1), (4, 4)]
    case = made(stands)
    found = told(case)
    assert set(found) == set(stands)
    for n, at in enumerate(stands):
        assert torch.equal(found[at], case.kept[n])


def test_what_is_told_is_taken_out_of_both_tables_until_nothing_more_is():
    # word 4 stands once, beside word 5; without it place 5 tells word 5, and without this word 5 its other place
    stands = [(4, 5), (5, 5), (5, 0), (6, 0), (6, 0), (7, 0)]
    case = made(stands)
    found = told(case)
    assert set(found) == {(4, 5), (5, 5), (5, 0), (7, 0)}
    for n, at in enumerate(stands):
        assert at == (6, 0) or torch.equal(found[at], case.kept[n])


@pytest.mark.parametrize("rate", [0.3, None])
def test_a_word_that_stands_twice_at_one_place_is_not_told_as_one(rate: float | None):
    """Where both masks dropped a coordinate it lies on the line, too: 23 of 256, where one mask dropped 77."""
    stands = [(0, 1), (0, 1), (1, 0), (2, 3), (3, 2), (4, 4)]
    case = made(stands, rate=0.3)
    found = told(case, rate=rate)
    assert set(found) == {(1, 0), (2, 3), (3, 2), (4, 4)}
    for n, at in enumerate(stands[2:], 2):
        assert torch.equal(found[at], case.kept[n])


@pytest.mark.parametrize("digits", [1e-4, 1e-2])
def test_rounded_gradients_tell_nothing(digits: float):
    case = made([(0, 1), (1, 0), (2, 3)])
    step = digits * float(case.words.abs().max())
    case.places = (case.places / step).round() * step
    assert told(case, (case.words / step).round() * step) == {}


@pytest.mark.minilm
def test_past_the_width_words_that_stand_once_are_read_where_they_stand(minilm):
    batch = sample_batch(minilm, 0, 34)
    tokens = sum(map(len, batch.sequences()))
    assert tokens > minilm.width
    seen = seen_of(Client(minilm, dropout=True), batch)
    first = span(seen, 0)
    assert first is not None
    truth = Counter((t, p) for s in batch.sequences() for p, t in enumerate(s))
    rows = rows_of_tables(seen, MaskedInputs(minilm, first, words=words_of(seen)), stream(0, "attack"))
    found = Counter((row.token, row.position) for row in rows)
    assert not found - truth
    often = Counter(t for s in batch.sequences() for t in s)
    assert {t for t, n in often.items() if n == 1} <= {row.token for row in rows}
    answer = Decode().run(seen, stream(0, "attack"))
    assert answer.notes == (TOLD_BY_TABLES,)
    once = {t for t, n in often.items() if n == 1}
    together = []
    for guess in answer.sequences:
        of = [next(s for s in batch.sequences() if t in s) for t in guess if t in once]
        most = max(of, key=of.count, default=[])
        mine = [t for t in guess if t in once and t in most]
        assert mine == sorted(mine, key=most.index), "in the order in which they stand there"
        together.append((len(mine), len(of)))
    right, every = map(sum, zip(*together, strict=True))
    assert right >= 0.85 * every
    frozen = seen_of(Client(minilm, dropout=True, freeze=("embeddings",)), batch)
    assert rows_of_tables(frozen, MaskedInputs(minilm, first, words=words_of(frozen)), stream(0, "attack")) == []


@pytest.mark.minilm
def test_a_sentence_is_proven_from_its_tables_rows_alone(minilm, monkeypatch):
    """With the scan for rows switched off nothing else finds them."""
    batch = sample_batch(minilm, 4, 1)
    seen = seen_of(Client(minilm, dropout=True), batch)
    monkeypatch.setattr("gradaudit.leakage.decoding.rows._scan", lambda *given: None)
    found = Decode().run(seen, stream(0, "attack"))
    assert set(found.sequences) == {tuple(s) for s in batch.sequences()}
    assert found.certificates == ("proven",)
    tables = [n for g in ("word", "position") for n in minilm.group(g)]
    less = replace(seen, tensors={name: t for name, t in seen.tensors.items() if name not in tables})
    assert "proven" not in (Decode().run(less, stream(0, "attack")).certificates or ())
