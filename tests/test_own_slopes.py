"""Block 0's q, k or v alone, dropout off: sentences are told by what comes back to their tokens, and proven by rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gradaudit.leakage.one_matrix.own_slopes as slopes_file
import tiny_models
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.leakage.decoding.pairs import Pairs, candidate_pairs, framed
from gradaudit.leakage.decoding.taking_out import take_out
from gradaudit.leakage.one_matrix.own_slopes import OwnSlopes
from gradaudit.leakage.rowspace.deflation import Remainder, matrices, remainder
from gradaudit.leakage.rowspace.subspace import Span, span
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.progress import StoppedError, shown_by
from gradaudit.streams import stream
from gradaudit.types import Batch, Given, Observation
from made_data import sample_batch

pytestmark = pytest.mark.minilm
EPS = 1.2e-7


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


@pytest.fixture(scope="module")
def three_classes():
    return load_model(ModelSpec("minilm", labels=3))


def seen_of(model, batch: Batch, selection: str) -> Observation:
    return tiny_models.seen_of(Client(model), batch, selection, Given(), 3)


def texts(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(s) for s in batch.sequences()]


def rest_of(seen: Observation) -> Remainder:
    return remainder(matrices(seen, 1), EPS)


def near(model, seen: Observation) -> Pairs:
    first = span(seen, 0)
    assert first is not None
    return candidate_pairs(model, framed(model, first), 40)


def with_another(sentence: tuple[int, ...], place: int, token: int = 2003) -> tuple[int, ...]:
    assert sentence[place] != token
    return (*sentence[:place], token, *sentence[place + 1 :])


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_right_sentences_fit_and_one_wrong_word_anywhere_does_not(minilm, role: str):
    batch = sample_batch(minilm, 12, 3)
    slopes = OwnSlopes(minilm, rest_of(seen_of(minilm, batch, f"0:{role}")))
    right = texts(batch)
    assert float(slopes.misfits(right).max()) < 0.1
    wrong = [with_another(s, place) for s in right for place in range(1, len(s) - 1)]
    assert float(slopes.misfits(wrong).min()) > 1


@pytest.mark.parametrize("labels", [[0, 0, 0], [1, 2, 0], [2, 2, 2]])
def test_no_label_need_be_known(three_classes, labels: list[int]):
    batch = tiny_models.batch_of(three_classes, ["a cold wind", "the patient slept well today", "nobody knew"], labels)
    slopes = OwnSlopes(three_classes, rest_of(seen_of(three_classes, batch, "0:v")))
    assert float(slopes.misfits(texts(batch)).max()) < 1e-2
    assert float(slopes.misfits([with_another(s, 2) for s in texts(batch)]).min()) > 1


def test_sentences_of_any_lengths_are_judged_as_one_by_one(minilm, monkeypatch):
    monkeypatch.setattr(slopes_file, "_ENTRIES", 4 * minilm.width**2)  # four at once
    batch = sample_batch(minilm, 12, 3)
    slopes = OwnSlopes(minilm, rest_of(seen_of(minilm, batch, "0:q")))
    some = [with_another(s, place) for place in (2, 3) for s in texts(batch)]
    alone = [float(slopes.misfits([one])) for one in some]
    assert slopes.misfits(some).tolist() == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("role", ["q", "v"])
def test_wrong_words_are_exchanged_until_none_is_left(minilm, role: str):
    batch = sample_batch(minilm, 12, 3)
    seen = seen_of(minilm, batch, f"0:{role}")
    right, other = sorted(texts(batch), key=len)[-2:]
    wrong = right
    for place in (2, 4, 5):
        wrong = with_another(wrong, place, other[place])
    slopes = OwnSlopes(minilm, rest_of(seen))
    found, value = slopes.mended([near(minilm, seen)], wrong)
    assert found == right
    assert value < 1
    assert slopes.mended([near(minilm, seen)], wrong)[0] == wrong  # one that was mended before is left as it is


def test_words_in_each_others_places_change_them(minilm):
    batch = sample_batch(minilm, 12, 3)
    seen = seen_of(minilm, batch, "0:v")
    right = max(texts(batch), key=len)
    assert len(set(right[3:7])) == 4
    wrong = (*right[:3], right[5], right[6], right[3], right[4], *right[7:])  # neither word nor pair alone mends it
    may_stand = Pairs(
        torch.arange(len(wrong)).repeat(2), torch.tensor([*wrong, *right]), torch.zeros(2 * len(wrong), 1)
    )
    slopes = OwnSlopes(minilm, rest_of(seen))
    assert right in slopes._moved(may_stand, wrong)
    assert right not in slopes._moved(may_stand.pick(may_stand.positions != 4), wrong)
    none = may_stand.pick(may_stand.positions < 0)
    assert slopes.mended([none, may_stand], wrong)[0] == right
    assert OwnSlopes(minilm, rest_of(seen)).mended([none, none], wrong)[0] == wrong


def test_words_that_are_not_near_are_not_put_in(minilm):
    batch = sample_batch(minilm, 12, 3)
    seen = seen_of(minilm, batch, "0:q")
    right = texts(batch)[0]
    some = near(minilm, seen)
    without = some.pick(~((some.positions == 2) & (some.tokens == right[2])))
    wrong = with_another(right, 2)
    assert OwnSlopes(minilm, rest_of(seen)).mended([without], wrong)[0] != right
    assert OwnSlopes(minilm, rest_of(seen)).mended([without, some], wrong)[0] == right


def test_keys_alone_tell_every_row_beside_the_first_ones(minilm):
    batch = sample_batch(minilm, 12, 3)
    seen = seen_of(minilm, batch, "0:k")
    first = span(seen, 0)
    assert first is not None
    for sentence in texts(batch):
        rows = torch.cat([minilm.first_inputs(place, torch.tensor([t])) for place, t in enumerate(sentence)]).double()
        assert float(first.residual(rows).min()) > 1e-2
        assert float(framed(minilm, first).residual(rows).max()) < 1e-4
    values = span(seen_of(minilm, batch, "0:v"), 0)
    assert values is not None
    assert framed(minilm, values) is values


@pytest.mark.parametrize("selection", ["0:q", "0:k", "0:v", "0:q,k,v"])
def test_a_batch_is_read_from_block_0_alone_and_proven(minilm, selection: str):
    batch = sample_batch(minilm, 12, 3)
    found = Decode()(seen_of(minilm, batch, selection), stream(0, "attack"))
    assert sorted(found.sequences) == sorted(texts(batch))
    assert found.certificates == ("proven",) * 3


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_the_number_of_sentences_need_not_be_known(minilm, role: str):
    batch = sample_batch(minilm, 12, 2)
    seen = tiny_models.seen_of(Client(minilm), batch, f"0:{role}", Given(batch_size=False), 3)
    found = Decode()(seen, stream(0, "attack"))
    assert sorted(found.sequences) == sorted(texts(batch))
    assert found.certificates == ("proven",) * 2


def test_what_was_taken_out_is_kept_when_it_is_stopped(minilm):
    batch = sample_batch(minilm, 12, 2)

    def stop(what: str, done: int, total: int | None) -> None:
        if (what, done) == ("decode: sentences", 1):
            raise KeyboardInterrupt

    with pytest.raises(StoppedError) as stopped, shown_by(stop):
        Decode()(seen_of(minilm, batch, "0:q"), stream(0, "attack"))
    assert set(stopped.value.found.sequences) < set(texts(batch))
    assert stopped.value.found.certificates == ("proven",)


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_the_rank_falls_by_the_rows_that_no_other_sentence_has(minilm, role: str):
    said = ["the old river is high", "the old man slept", "nobody came here today"]
    mine = tiny_models.batch_of(minilm, said, [0, 1, 0])
    rest = rest_of(seen_of(minilm, mine, f"0:{role}"))
    for n, sentence in enumerate(texts(mine)):
        taken = take_out(minilm, rest, sentence, [1 / 3], [0])
        assert taken is not None
        assert taken.share == 1 / 3
        assert taken.proven == (n != 1)  # the second has two words of its own: too few to be proven by themselves
        for place in (1, 2, len(sentence) - 2):
            assert take_out(minilm, rest, with_another(sentence, place), [1 / 3], [0]) is None
    for other in texts(sample_batch(minilm, 40, 3)):
        assert take_out(minilm, rest, other, [1 / 3], [0]) is None


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_a_weak_direction_that_sinks_takes_no_sentence_out(minilm, monkeypatch, role: str):
    batch = sample_batch(minilm, 12, 2)
    rest = rest_of(seen_of(minilm, batch, f"0:{role}"))
    wrong, right = with_another(texts(batch)[0], 3), texts(batch)[0]
    rank, honest = rest.span(0).rank, Remainder.span

    def one_fewer(self: Remainder, layer: int) -> Span:
        found = honest(self, layer)
        return (
            found if self is rest else replace(found, basis=found.basis[:, : rank - 1], rank=min(found.rank, rank - 1))
        )

    monkeypatch.setattr(Remainder, "span", one_fewer)
    assert take_out(minilm, rest, wrong, [1 / 2], [0]) is None
    assert take_out(minilm, rest, right, [1 / 2], [0]) is not None


def test_a_sentence_of_other_sentences_words_is_not_taken_out(minilm):
    mine = tiny_models.batch_of(
        minilm, ["the old river is high", "one new bridge was low", "nobody came here today"], [0, 1, 0]
    )
    one, other, _ = texts(mine)
    for role in "qkv":
        rest = rest_of(seen_of(minilm, mine, f"0:{role}"))
        for crossed in range(2, 6):
            assert take_out(minilm, rest, (*one[:crossed], *other[crossed:]), [1 / 3], [0]) is None


def test_under_another_loss_sentences_are_guesses(minilm):
    batch = sample_batch(minilm, 12, 2)
    model = load_model(ModelSpec("minilm", loss="squared"))
    found = Decode()(seen_of(model, batch, "0:q,k,v"), stream(0, "attack"))
    assert set(found.certificates or ()) <= {"guess"}
    assert any("only block 0" in note for note in found.notes)
