"""Sentences from decoded rows: what is called proven, with every row known and with some of them missing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import gradaudit.attacks.decode as attack_file
import tiny_models
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.leakage.decoding import missing_rows, sentences
from gradaudit.leakage.decoding.rows import INSIDE, MaskedInputs, Row, Search, find_rows
from gradaudit.leakage.decoding.sentences import DecodedRows, Signals, certificate, likely_rate
from gradaudit.leakage.rowspace.subspace import span
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.progress import TimeIsOverError
from gradaudit.streams import stream
from gradaudit.types import Given
from test_linking import HEADS, SIZE, made

FIRST, LAST = 101, 102


def linked(
    monkeypatch,
    groups: list[list[int]],
    parts: tuple[Tensor, ...],
    positions: list[int],
    draws: tuple[tuple[Tensor, ...], ...] = (),
) -> sentences.Linked:
    """Certify given groups of rows; tokens are framed where they stand first or last in their group."""
    tokens = [2000 + i for i in range(len(positions))]
    for members in groups:
        tokens[members[0]], tokens[members[-1]] = FIRST, LAST
    rows = DecodedRows.__new__(DecodedRows)
    nothing = torch.zeros(0)
    rows.found = [Row(t, p, nothing, nothing) for t, p in zip(tokens, positions, strict=True)]
    special = SimpleNamespace(prefix=(FIRST,), suffix=(LAST,), ids={0, FIRST, LAST})
    rows.model, rows.size = SimpleNamespace(special=special), len(groups)  # type: ignore[assignment]
    monkeypatch.setattr(sentences, "group", lambda *_: groups)
    monkeypatch.setattr(DecodedRows, "_changes", lambda *_: [])
    monkeypatch.setattr(Signals, "affinity", lambda self, rows, positions: torch.zeros(len(rows), len(rows)))
    hidden, none = (torch.zeros(0, HEADS, SIZE, dtype=torch.double),) * 2, torch.zeros(1, 0)
    rows._blurred = [Signals(*drawn, hidden, none, none) for drawn in draws]
    return rows.link(Signals(*parts, hidden, none, none))


def in_order(positions: list[int], sentence: list[int], which: int) -> list[int]:
    return sorted((i for i, s in enumerate(sentence) if s == which), key=lambda i: positions[i])


@pytest.mark.parametrize(("length", "likely"), [(9, True), (SIZE, False)])
def test_by_queries_alone_whole_sentences_are_likely_but_for_strangers_and_long_ones(length: int, likely: bool):
    toward_q, _, _, k, positions, sentence = made([length, length])
    own, other = in_order(positions, sentence, 0), in_order(positions, sentence, 1)
    tokens = [2000 + i for i in range(len(positions))]
    for members in (own, other):
        tokens[members[0]], tokens[members[-1]] = FIRST, LAST
    rows = DecodedRows.__new__(DecodedRows)
    nothing = torch.zeros(0)
    rows.found = [Row(t, p, nothing, nothing) for t, p in zip(tokens, positions, strict=True)]
    rows.model = SimpleNamespace(special=SimpleNamespace(prefix=(FIRST,), suffix=(LAST,), ids={0, FIRST, LAST}))  # type: ignore[assignment]
    assert rows._closed(toward_q, k, own) is likely
    assert not rows._closed(toward_q, k, [*own[:3], other[3], *own[4:]])
    assert not rows._closed(toward_q, k, own[:-1])  # it has no end


def test_right_sentences_are_proven_and_one_stranger_is_not(monkeypatch):
    *parts, positions, sentence = made([8, 9, 7])
    right = [in_order(positions, sentence, s) for s in range(3)]
    assert linked(monkeypatch, right, tuple(parts), positions).certificates == ["proven"] * 3
    swapped = [[*right[0][:3], right[1][3], *right[0][4:]], right[1], right[2]]
    assert linked(monkeypatch, swapped, tuple(parts), positions).certificates == ["likely", "proven", "proven"]


def test_a_hole_is_a_guess(monkeypatch):
    *parts, positions, sentence = made([8, 9])
    right = [in_order(positions, sentence, s) for s in range(2)]
    holed = [[*right[0][:3], *right[0][4:]], right[1]]
    assert linked(monkeypatch, holed, tuple(parts), positions).certificates == ["guess", "proven"]


def test_one_member_in_one_head_is_enough_against_a_proof(monkeypatch):
    toward_q, toward_k, q, k, positions, sentence = made([8, 9])
    right = [in_order(positions, sentence, s) for s in range(2)]
    toward_q[right[0][4], 2] += torch.randn(SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    found = linked(monkeypatch, right, (toward_q, toward_k, q, k), positions)
    assert found.certificates == ["likely", "proven"]


def test_the_worst_member_decides(monkeypatch):
    toward_q, toward_k, q, k, positions, sentence = made([14, 9])
    right = [in_order(positions, sentence, s) for s in range(2)]
    noise = torch.randn(HEADS, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    toward_q[right[0][4]] += 4e-3 * noise * toward_q[right[0][4]].norm() / noise.norm()
    none = torch.zeros(0, HEADS, SIZE, dtype=torch.double)
    left, _ = Signals(toward_q, toward_k, q, k, (none, none), torch.zeros(1, 0), torch.zeros(1, 0)).left(
        torch.tensor(right[0])
    )
    assert float(left.min()) < sentences.CLOSED < float(left.max()), "one member alone is over the limit"
    assert linked(monkeypatch, right, (toward_q, toward_k, q, k), positions).certificates == ["likely", "proven"]


@pytest.mark.parametrize("alike", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("told", [0.3, 1.0])
def test_signals_with_an_error_are_proven_where_they_leave_no_more_than_that(monkeypatch, alike: float, told: float):
    """However like the draw of the error happens to be to the error itself; told too small, nothing is."""
    toward_q, toward_k, q, k, positions, sentence = made([8, 9])
    right = [in_order(positions, sentence, s) for s in range(2)]
    rng = torch.Generator().manual_seed(0)
    error, other = (0.01 * torch.randn(toward_q.shape, generator=rng, dtype=torch.double) for _ in range(2))
    draw = told * (alike * error if alike else other)
    seen = toward_q + error
    draws = tuple((seen + sign * draw, toward_k, q, k) for sign in (1, -1))
    found = linked(monkeypatch, right, (seen, toward_k, q, k), positions, draws)
    assert found.certificates == ["proven" if told == 1.0 else "likely"] * 2


def test_a_set_too_long_for_its_heads_is_not_proven(monkeypatch):
    *parts, positions, sentence = made([8 * SIZE + 1])
    right = [in_order(positions, sentence, 0)]
    assert linked(monkeypatch, right, tuple(parts), positions).certificates == ["likely"]


@pytest.mark.parametrize(
    ("complete", "left", "length", "spare", "said"),
    [
        (True, 1e-5, 12, 100.0, "proven"),
        (False, 1e-5, 12, 100.0, "guess"),
        (True, 2e-3, 12, 100.0, "likely"),
        (True, 1e-5, 256, 100.0, "proven"),
        (True, 1e-5, 257, 100.0, "likely"),  # more than eight times a head of 32
        (True, 1e-5, 12, 3.0, "likely"),  # as many unknowns as a third of the conditions
    ],
)
def test_a_proof_needs_all_four(complete: bool, left: float, length: int, spare: float, said: str):
    assert certificate(complete, left, length, 32, spare) == said


@pytest.mark.parametrize(
    ("shown", "bits", "rate"),
    [
        (0.095, 3840, 0.1),
        (0.105, 3840, 0.1),
        (0.095, 384000, 0.095),
        (0.151, 3840, 0.15),
        (0.12, 38400, 0.12),
        (0.0, 1, 0.0),
    ],
)
def test_a_round_rate_that_masks_may_have_had_is_taken_for_theirs(shown: float, bits: int, rate: float):
    assert likely_rate(shown, bits) == pytest.approx(rate)


@pytest.fixture(scope="module")
def decoded() -> Any:
    """Return a real batch's sentences, observation, span and rows, dropout on."""
    model = load_model(ModelSpec("minilm"))
    texts = ["Rufus owes Clara nine euros.", "My key lies under the third pot.", "She came home late on Friday night."]
    batch = make_batch(model, texts, [0, 1, 1])
    client = Client(model, dropout=True, freeze=("embeddings",))
    seen = tiny_models.seen_of(client, batch, "0:q,k,v", Given(), 3)
    first = span(seen, 0)
    assert first is not None
    inputs = MaskedInputs(model, first)
    rows = find_rows(inputs, Search(3, 200, 64), stream(0, "rows"))
    assert len(rows) == first.rank
    return SimpleNamespace(truth={tuple(s) for s in batch.sequences()}, seen=seen, inputs=inputs, rows=rows)


@pytest.mark.minilm
def test_rows_are_made_at_the_round_rate_where_none_was_told(decoded):
    told = DecodedRows(decoded.seen, decoded.inputs, decoded.rows)
    knowledge = dataclasses.replace(decoded.seen.knowledge, dropout=None)
    untold = DecodedRows(dataclasses.replace(decoded.seen, knowledge=knowledge), decoded.inputs, decoded.rows)
    assert abs(untold.rate() - 0.1) > 1e-4, "masks show the rate only about"
    assert torch.equal(untold.rows(), told.rows())


def without(decoded: Any, lost: list[int]) -> tuple[DecodedRows, Signals]:
    rows = DecodedRows(decoded.seen, decoded.inputs, [r for i, r in enumerate(decoded.rows) if i not in lost])
    signals = rows.signals()
    assert signals is not None
    return rows, signals


def lost_rows(decoded: Any, count: int) -> list[int]:
    """Return so many rows of one sentence, its first one among them."""
    rows, signals = without(decoded, [])
    longest = max(rows.link(signals).groups, key=len)
    return longest[:count]


@pytest.mark.minilm
@pytest.mark.parametrize("count", [1, 2, 4])
def test_sentences_are_proven_without_the_rows_of_another_and_show_where_those_lie(decoded, count: int):
    lost = lost_rows(decoded, count)
    rows, signals = without(decoded, lost)
    found = rows.link(signals)
    texts = rows.texts(found.groups)
    proven = {t for t, sure in zip(texts, found.certificates, strict=True) if sure == "proven"}
    assert len(proven) == 2
    assert proven <= decoded.truth
    wanted = {(decoded.rows[i].token, decoded.rows[i].position) for i in lost}
    for look in (missing_rows._by_sentence, missing_rows._by_leaning):
        more = look(rows, signals, found, Search(3, 200, 64), 0, 0, stream(0, "more"))
        assert {(r.token, r.position) for r in more} == wanted
    *_, (again, whole) = missing_rows.completing(rows, signals, Search(3, 200, 64), stream(0, "more"))
    assert set(again.texts(whole.groups)) == decoded.truth
    assert whole.certificates == ["proven"] * 3


@pytest.mark.minilm
def test_a_sentence_that_was_completed_is_proven_though_rows_of_another_stay_missing(decoded, monkeypatch):
    whole, signals = without(decoded, [])
    one, other, _ = whole.link(signals).groups
    rows, signals = without(decoded, [one[2], other[2]])
    answers = [[decoded.rows[one[2]]]]

    def some(*given: Any) -> list[Row]:
        return answers.pop() if answers else []

    monkeypatch.setattr(missing_rows, "_by_sentence", some)
    monkeypatch.setattr(missing_rows, "_by_leaning", lambda *given: [])
    *_, (_, linked) = missing_rows.completing(rows, signals, Search(3, 200, 64), stream(0, "more"))
    assert sorted(linked.certificates) == ["guess", "proven", "proven"]


@pytest.mark.minilm
def test_sentences_that_were_proven_are_held_and_the_others_linked_beside_them(decoded):
    rows, signals = without(decoded, lost_rows(decoded, 1))
    first = rows.link(signals)
    held = [g for g, sure in zip(first.groups, first.certificates, strict=True) if sure == "proven"][:1]
    again = rows.link(signals, held)
    assert again.groups[0] == held[0]
    assert sorted(map(sorted, again.groups)) == sorted(map(sorted, first.groups))
    assert sorted(again.certificates) == sorted(first.certificates)


@pytest.mark.minilm
def test_what_was_read_when_the_time_is_over_is_not_lost(decoded, monkeypatch):
    rows, _ = without(decoded, lost_rows(decoded, 1))
    monkeypatch.setattr(attack_file, "find_rows", lambda *given, **kept: rows.found)

    def ended(*given: Any) -> None:
        raise TimeIsOverError("rows")

    monkeypatch.setattr(missing_rows, "look_by_sentence", ended)
    with pytest.raises(TimeIsOverError) as over:
        Decode().run(decoded.seen, stream(0, "attack"))
    proven = [
        s for s, c in zip(over.value.found.sequences, over.value.found.certificates, strict=True) if c == "proven"
    ]
    assert len(proven) == 2
    assert set(proven) <= decoded.truth


@pytest.mark.minilm
def test_few_heads_never_close_what_all_leave_open(decoded):
    lost = lost_rows(decoded, 2)
    rows, signals = without(decoded, lost)
    for members, sure in zip(*dataclasses.astuple(rows.link(signals))[:2], strict=True):
        of = torch.tensor(members)
        few, every = (float(signals.left(of, heads)[0].max()) for heads in (2, None))
        assert (few < 1e-4) == (every < 1e-4) == (sure == "proven")


@pytest.mark.minilm
def test_missing_rows_excuse_no_stranger(decoded):
    lost = lost_rows(decoded, 2)
    rows, signals = without(decoded, lost)
    groups = [g for g, sure in zip(*dataclasses.astuple(rows.link(signals))[:2], strict=True) if sure == "proven"]
    one, other = groups
    for at in range(1, min(len(one), len(other)) - 1):
        decoy = torch.tensor([*one[:at], other[at], *one[at + 1 :]])
        assert float(signals.left(decoy)[0].max()) > 0.05
    assert float(signals.left(torch.tensor(one))[0].max()) < 1e-4


@pytest.mark.minilm
def test_a_row_must_lie_in_the_span_and_keep_half(decoded):
    inputs, row = decoded.inputs, decoded.rows[1]
    clean = row.clean[None]
    assert bool(inputs.accepted(clean, row.kept[None], 0.1)[1][0])
    away = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    away = clean + 2e-3 * clean.norm() * away / away.norm()
    _, inside = inputs.accepted(away, row.kept[None], 0.1)
    assert not bool(inside[0]), f"the limit is {INSIDE}"
    # every mask passes in the whole space: what decides is how much it keeps
    everything = MaskedInputs(decoded.seen.model, dataclasses.replace(inputs.span, basis=torch.eye(384).double()))
    third = torch.arange(384) % 3 == 0
    assert not bool(everything.accepted(clean, third[None], 0.1)[1][0])
    assert bool(everything.accepted(clean, ~third[None], 0.1)[1][0])
