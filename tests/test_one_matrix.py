"""Sentences from one matrix of any block: the space of its inputs, rows of tried words, and what comes back."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gradaudit.leakage.one_matrix.batch as batch_file
import gradaudit.leakage.one_matrix.search as search_file
import tiny_models
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.one_matrix import most_telling
from gradaudit.leakage.one_matrix.batch import MASKED, UNLIKE_MASKED
from gradaudit.leakage.one_matrix.drawn_masks import DrawnMasks
from gradaudit.leakage.one_matrix.search import FILLED, SentenceSearch, barred_words
from gradaudit.leakage.one_matrix.signal import Fit, Remaining, Signal, shares
from gradaudit.leakage.one_matrix.word_rows import WordRows, framed, rows_among, rows_of, word_rows
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.progress import StoppedError
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Batch, Given, LocalTraining, Observation, Reconstruction
from made_data import sample_batch


def signal_of(seen: Observation) -> Signal | None:
    found = most_telling.signal_of(seen, stream(0, "attack"))
    return None if found is None else found[0]


ENCODERS = ("bert", "roberta", "mpnet", "distilbert", "electra")


def space(rank: int, width: int = 20, seed: int = 0, differences: bool = False) -> Signal:
    drawn = torch.randn(width, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    return Signal(1, "q", torch.linalg.qr(drawn)[0][None], differences)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


# the space


def test_rows_that_span_the_space_are_not_apart_from_it_and_others_are():
    signal = space(4)
    inside = drawn(4, 4) @ signal.basis[0].T
    assert float(signal.apart(inside)) == pytest.approx(0, abs=1e-6)
    assert float(signal.apart(inside[:2])) == pytest.approx(0, abs=1e-6)  # a part of a batch
    off = drawn(4, 20) - drawn(4, 20) @ signal.basis[0] @ signal.basis[0].T
    assert float(signal.apart(off)) == pytest.approx(4, abs=1e-6)


def test_being_apart_is_the_sum_of_the_squared_sines_of_the_angles_between_the_spaces():
    signal, rows = space(4), drawn(4, 20)
    cosines = torch.linalg.svdvals(torch.linalg.qr(rows.T)[0].T @ signal.basis[0])
    assert float(signal.apart(rows)) == pytest.approx(float((1 - cosines.square()).sum()), rel=1e-5)


def test_a_word_said_everywhere_fills_one_direction():
    signal = space(4)
    row = drawn(1, 4) @ signal.basis[0].T
    assert float(signal.apart(row.expand(4, -1))) == pytest.approx(3, abs=1e-3)


def test_a_share_is_that_of_the_part_beside_the_chosen_rows():
    signal, chosen, rows = space(4), drawn(3, 20, seed=2), drawn(7, 20, seed=3)
    away = torch.eye(20, dtype=torch.double) - chosen.T @ torch.linalg.pinv(chosen.T)
    new = rows @ away
    wanted = (new @ signal.basis[0]).square().sum(1) / new.square().sum(1)
    assert torch.allclose(shares(signal, rows, chosen), wanted)
    assert torch.allclose(Remaining(signal, rows, chosen).share, wanted)


def test_shares_follow_each_row_that_is_chosen():
    signal, chosen, rows = space(4), drawn(5, 20, seed=2), drawn(7, 20, seed=3)
    remaining = Remaining(signal, rows, chosen[:2])
    for row in chosen[2:]:
        remaining.choose(row)
    assert torch.allclose(remaining.share, shares(signal, rows, chosen))


def test_shares_of_all_words_are_those_of_their_moved_rows():
    signal, own, rows, shifts = space(4), drawn(5, 20, seed=2), drawn(30, 20, seed=3), drawn(3, 20, seed=4)
    words = WordRows(rows, rows.square().sum(1))
    found = words.shares(signal, shifts, own, [None, 0, 4])
    assert torch.allclose(found[0], shares(signal, rows + shifts[0], own))
    assert torch.allclose(found[1], shares(signal, rows + shifts[1], own[1:]))
    assert torch.allclose(found[2], shares(signal, rows + shifts[2], own[:4]))


# a row's parts, each in a space of its own


def parted(rank: int) -> tuple[Signal, list[Signal]]:
    """A space of rows of three parts, eight wide, and that of each part alone."""
    each = [space(rank, 8, seed) for seed in range(3)]
    return Signal(1, "o", torch.cat([one.basis for one in each]), differences=False, heads=torch.arange(3)), each


def part(rows: Tensor, number: int) -> Tensor:
    return rows[..., 8 * number : 8 * number + 8]


def test_rows_of_several_parts_are_apart_by_the_mean_over_their_parts():
    signal, each = parted(3)
    rows = drawn(2, 3, 24)
    wanted = sum(one.apart(part(rows, number)) for number, one in enumerate(each)) / 3
    assert torch.allclose(signal.apart(rows), wanted)
    inside = torch.cat([drawn(3, 3, seed=number) @ one.basis[0].T for number, one in enumerate(each)], 1)
    assert float(signal.apart(inside)) == pytest.approx(0, abs=1e-6)
    assert torch.allclose(signal.within(inside), torch.ones(3, dtype=torch.double))


def test_shares_of_several_parts_count_each_by_its_own_rows():
    signal, _ = parted(3)
    chosen, rows, shifts = drawn(2, 24, seed=2), drawn(7, 24, seed=3), drawn(2, 24, seed=4)
    new = torch.zeros_like(rows)
    for number in range(3):
        mine = part(chosen, number)
        part(new, number).copy_(part(rows, number) @ (torch.eye(8).double() - mine.T @ torch.linalg.pinv(mine.T)))
    wanted = signal.within(new)
    assert torch.allclose(shares(signal, rows, chosen), wanted)
    remaining = Remaining(signal, rows, chosen[:1])
    remaining.choose(chosen[1])
    assert torch.allclose(remaining.share, wanted)
    found = WordRows(rows, rows.square().sum(1)).shares(signal, shifts, chosen, [None, 1])
    assert torch.allclose(found[0], shares(signal, rows + shifts[0], chosen))
    assert torch.allclose(found[1], shares(signal, rows + shifts[1], chosen[:1]))


def test_a_sentence_is_taken_out_of_each_part():
    signal, each = parted(3)
    mine, other = drawn(2, 9), drawn(1, 9, seed=5)

    def inside(numbers: Tensor) -> Tensor:
        return torch.cat([numbers[:, 3 * n : 3 * n + 3] @ one.basis[0].T for n, one in enumerate(each)], 1)

    left = signal.without(inside(mine))
    assert left.rank == 1
    assert float(left.apart(left.seen(inside(other)))) == pytest.approx(0, abs=1e-6)
    assert float(left.seen(inside(mine)).norm()) < 1e-9


def test_a_sentence_that_is_taken_out_leaves_the_others():
    signal = space(5)
    mine, other = drawn(2, 5) @ signal.basis[0].T, drawn(3, 5, seed=9) @ signal.basis[0].T
    left = signal.without(mine)
    assert left.rank == 3
    assert float(left.apart(left.seen(other))) == pytest.approx(0, abs=1e-6)
    assert float(left.seen(mine).norm()) < 1e-9
    assert left.without(left.seen(other)).rank == 0


# rows of tried words


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize(
    ("key", "differences"), [((1, "q"), False), ((0, "f"), False), ((1, "p"), False), ((1, "k"), True)]
)
def test_the_words_of_a_sentence_tried_in_it_give_its_own_rows(load, family: str, key, differences: bool):
    model = load(family)
    ids = torch.tensor([model.tokens("the cat sat on a mat")[:7]])
    signal = Signal(*key, torch.eye(4)[None], differences)
    places = torch.arange(1, ids.shape[1])
    tried = torch.stack([ids[0, 1:], ids[0, 1:].flip(0)], 1)
    rows = rows_among(model, signal, ids[0], places, tried)
    own = rows_of(model, signal, ids)[0]
    assert torch.allclose(rows[:, 0], own if differences else own[1:], atol=1e-5)
    # elsewhere in the sentence a word has another row
    assert float((rows[:, 1] - rows[:, 0]).abs().max()) > 1e-2


@pytest.mark.parametrize("family", ENCODERS)
def test_in_block_0_a_word_that_is_tried_gives_the_row_it_would_have_there(load, family: str):
    model = load(family)
    ids = torch.tensor(model.tokens("the cat sat on a mat")[:7])
    signal = Signal(0, "f", torch.eye(4)[None], differences=False)
    word = int(ids[4])
    rows = rows_among(model, signal, ids, torch.tensor([2]), torch.tensor([[word]]))
    there = ids.clone()
    there[2] = word
    assert torch.allclose(rows[0, 0], rows_of(model, signal, there[None])[0, 2], atol=1e-5)


def test_rows_of_every_word_are_kept_while_model_and_matrix_are_the_same(folders):
    model = tiny_models.tiny(folders["bert"])
    signal = Signal(1, "q", torch.eye(4)[None], differences=False)
    kept = word_rows(model, signal)
    assert word_rows(model, replace(signal, roles="qv")) is kept
    behind = word_rows(model, replace(signal, roles="f"))
    assert not torch.allclose(behind.rows, kept.rows)
    again = word_rows(model, signal)
    assert torch.equal(again.rows, kept.rows)
    with torch.no_grad():
        model.parameters()[model.views(0, "v")[0].parameter].mul_(2)
    assert not torch.allclose(word_rows(model, signal).rows, kept.rows)


# what is read


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


def seen_of(model, batch: Batch, selection: str, given: Given | None = None, **how) -> Observation:
    client = Client(model, **({"dropout": False, "freeze": ()} | how))
    return tiny_models.seen_of(client, batch, selection, given or Given(), 3)


def read(seen: Observation) -> Reconstruction:
    return Decode()(seen, stream(0, "attack"))


@pytest.mark.minilm
@pytest.mark.parametrize("selection", ["0:k", "1:q", "2:k", "0:f", "3:f", "1:p", "1:k,v", "0:o", "1:o"])
def test_one_matrix_gives_the_sentence_and_proves_it(minilm, selection: str):
    batch = sample_batch(minilm, 4, 1)
    found = read(seen_of(minilm, batch, selection))
    assert found.sequences == tuple(map(tuple, batch.sequences()))
    assert found.certificates == ("proven",)
    assert batch.labels is not None
    assert found.labels == tuple(batch.labels.tolist())
    assert f"block {selection[0]}'s" in found.notes[0]


@pytest.mark.minilm
def test_nothing_beside_the_gradient_need_be_given(minilm):
    nothing = Given(batch_size=False, training=False, dropout=False, defenses=False)
    batch = sample_batch(minilm, 20, 1)
    found = read(seen_of(minilm, batch, "1:q", nothing))
    assert tuple(batch.sequences()[0]) in found.sequences


@pytest.mark.minilm
def test_a_pair_is_read_sentence_by_sentence(minilm):
    batch = sample_batch(minilm, 8, 2)
    found = read(seen_of(minilm, batch, "1:f", Given(lengths=True)))
    assert set(found.sequences) == set(map(tuple, batch.sequences()))
    assert found.certificates == ("proven", "proven")


@pytest.mark.minilm
def test_the_same_sentence_twice_is_told_once_and_the_copy_is_said(minilm):
    text = "Rufus owes Clara 900 euros."
    batch = make_batch(minilm, [text, text], [0, 0])
    found = read(seen_of(minilm, batch, "1:q", Given(lengths=True)))
    assert found.sequences == (tuple(batch.sequences()[0]),)
    assert found.certificates == ("likely",)
    assert "the others of the batch are copies of these, or send nothing" in found.notes


@pytest.mark.minilm
def test_stopped_with_ctrl_c_it_gives_the_sentences_that_it_has(minilm, monkeypatch):
    batch = sample_batch(minilm, 8, 2)
    run, calls = SentenceSearch.run, []

    def stopped(self, *given):
        calls.append(run(self, *given))
        if len(batch_search.found) == 1:
            raise KeyboardInterrupt
        return calls[-1]

    made = batch_file.BatchSearch.__init__

    def remembered(self, *given):
        nonlocal batch_search
        made(self, *given)
        batch_search = self

    batch_search: Any = None
    monkeypatch.setattr(batch_file.BatchSearch, "__init__", remembered)
    monkeypatch.setattr(SentenceSearch, "run", stopped)
    with pytest.raises(StoppedError) as stop:
        read(seen_of(minilm, batch, "1:f", Given(lengths=True)))
    assert len(stop.value.found.sequences) == 1
    assert set(stop.value.found.sequences) < set(map(tuple, batch.sequences()))
    assert stop.value.found.certificates == ("likely",)


@pytest.mark.minilm
def test_of_the_last_blocks_values_weak_directions_are_lost_and_a_known_length_helps(minilm):
    texts = ["A long and winding sentence, which has many words in it, was written on the wall of the old house."]
    batch = make_batch(minilm, texts, [1])
    signal = signal_of(seen_of(minilm, batch, "5:v"))
    assert signal is not None
    assert signal.rank < batch.tokens
    assert float(signal.apart(rows_of(minilm, signal, batch.ids))[0]) < FILLED
    search = batch_file.BatchSearch(minilm, signal, 1, (batch.tokens,), 64, stream(0, "attack"))
    assert list(search._lengths(1)) == [(batch.tokens, True)]


@pytest.mark.minilm
def test_another_sentence_is_far_from_the_space_and_a_wrong_word_is_seen(minilm):
    batch, other = sample_batch(minilm, 4, 1), sample_batch(minilm, 30, 1)
    signal = signal_of(seen_of(minilm, batch, "2:f"))
    assert signal is not None
    assert float(signal.apart(rows_of(minilm, signal, batch.ids))[0]) < FILLED / 100
    for place in range(1, batch.ids.shape[1] - 1):
        wrong = batch.ids.clone()
        wrong[0, place] = 1998 if int(wrong[0, place]) != 1998 else 2030
        assert float(signal.apart(rows_of(minilm, signal, wrong))[0]) > 10 * FILLED
    assert float(signal.apart(rows_of(minilm, signal, other.ids))[0]) > 1


@pytest.fixture(scope="module")
def sentence(minilm) -> Tensor:
    return sample_batch(minilm, 4, 1).ids[0]


@pytest.fixture(scope="module")
def search(minilm, sentence) -> SentenceSearch:
    """The search for that sentence in what enters block 2's feed-forward."""
    signal = signal_of(seen_of(minilm, sample_batch(minilm, 4, 1), "2:f"))
    assert signal is not None
    rng = stream(0, "attack")
    none = torch.zeros(0, dtype=torch.long)
    return SentenceSearch(minilm, signal, word_rows(minilm, signal), len(sentence), none, rng)


def mended(search: SentenceSearch, guess: Tensor) -> list[int]:
    """What comes of a guess that is not right, whose words' own rows tell what each place adds."""
    places = torch.tensor(search.places)
    words = guess[search.places]
    rows = rows_among(search.model, search.signal, guess, places, words[:, None])[:, 0]
    first = search._best([guess])
    assert not search.whole(first)
    return search._mended(first, rows - search.words.rows[words]).tokens.tolist()


@pytest.mark.minilm
def test_a_guess_with_words_in_wrong_places_is_mended(search, sentence):
    mixed = sentence.clone()
    mixed[1:-1] = mixed[1:-1].flip(0)
    assert mended(search, mixed) == sentence.tolist()


@pytest.fixture
def misled(search, sentence, monkeypatch) -> Tensor:
    """A guess with one wrong word; the right one is not what it is elsewhere, and few words are tried at a place."""
    monkeypatch.setattr(search_file, "_TRIED", 1)
    word, rows = int(sentence[7]), search.words.rows.clone()
    noise = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0))
    rows[word] += 1.3 * rows[word].norm() * noise / noise.norm()
    monkeypatch.setattr(search, "words", WordRows(rows, rows.square().sum(-1)))
    wrong = sentence.clone()
    wrong[7] = sentence[2]
    return wrong


@pytest.mark.minilm
def test_a_word_that_hardly_any_place_speaks_for_is_found_among_many(search, sentence, misled, monkeypatch):
    monkeypatch.setattr(search, "usual", sentence[:0])
    assert mended(search, misled) == sentence.tolist()


@pytest.mark.minilm
@pytest.mark.parametrize("usual", [True, False])
def test_a_usual_word_is_tried_everywhere(search, sentence, misled, monkeypatch, usual: bool):
    monkeypatch.setattr(search_file, "_WIDE", 1)
    monkeypatch.setattr(search_file, "_NEARLY", 0.0)
    monkeypatch.setattr(search, "usual", sentence[7:8] if usual else sentence[:0])
    assert (mended(search, misled) == sentence.tolist()) is usual


@pytest.mark.minilm
def test_where_the_others_are_nearly_right_every_word_is_tried(search, sentence, misled, monkeypatch):
    monkeypatch.setattr(search_file, "_WIDE", 1)
    monkeypatch.setattr(search, "usual", sentence[:0])
    assert mended(search, misled) == sentence.tolist()


@pytest.mark.minilm
def test_usual_words_are_frequent_ones_and_marks(minilm, search):
    said = [minilm.decode([int(token)]) for token in search.usual]
    assert {"the", "of", ".", ",", "?", "'"} <= set(said)
    assert {one for one in said if not one.isalpha()} <= set(string.punctuation)


@pytest.mark.minilm
@pytest.mark.parametrize("change", ["parts", "left out"])
def test_neighboring_parts_are_swapped_and_a_word_left_out_is_put_in(
    minilm, search, sentence, monkeypatch, change: str
):
    right = sentence.tolist()
    inner = right[1:-1]
    guess = [*inner[4:], *inner[:4]] if change == "parts" else [*inner[:3], *inner[4:-2], inner[1], *inner[-2:]]
    monkeypatch.setattr(search_file, "_REARRANGED", 10**7)
    monkeypatch.setattr(search_file, "_WORST", len(inner))
    now = framed(minilm, guess)
    found = [one.tolist() for one in search._rearranged(Fit(now, 1.0), rows_of(minilm, search.signal, now[None])[0])]
    assert right in found
    assert {len(one) for one in found} == {len(right)}
    monkeypatch.setattr(search_file, "_REARRANGED", 10 * len(right))
    assert len(search._rearranged(Fit(now, 1.0), rows_of(minilm, search.signal, now[None])[0])) == 10


@pytest.mark.minilm
def test_a_guess_that_nothing_else_betters_has_its_parts_swapped(search, sentence, monkeypatch):
    swapped = torch.cat([sentence[:1], sentence[9:-1], sentence[1:9], sentence[-1:]])
    monkeypatch.setattr(search_file, "_REARRANGED", 10**7)
    monkeypatch.setattr(search, "usual", sentence[:0])
    monkeypatch.setattr(search, "_pick", lambda *_: swapped)
    monkeypatch.setattr(search, "_others_kept", lambda *_: swapped)
    monkeypatch.setattr(search, "_neighbors", lambda *_: [swapped])
    monkeypatch.setattr(search, "_widened", lambda now, *_: now)
    assert mended(search, swapped) == sentence.tolist()


@pytest.mark.minilm
def test_a_sentence_of_one_word_has_nothing_to_rearrange_and_is_looked_for(minilm, search):
    short = SentenceSearch(minilm, search.signal, search.words, 3, torch.tensor([2000]), search.rng)
    assert len(mended(short, framed(minilm, [2001]))) == 3


@pytest.mark.minilm
def test_attention_output_holds_the_values_of_each_head(minilm):
    batch = sample_batch(minilm, 4, 1)
    signal = signal_of(seen_of(minilm, batch, "1:o"))
    assert signal is not None
    assert signal.heads is not None
    assert signal.rank == batch.tokens
    values = minilm.project(1, "v", minilm.attention_inputs(1, batch.ids)[0])[:, signal.heads].flatten(1)
    assert torch.allclose(rows_of(minilm, signal, batch.ids)[0], values)
    assert float((1 - signal.within(values.double())).max()) < 1e-6
    assert float(signal.apart(values)) < FILLED / 100
    wrong = batch.ids.clone()
    wrong[0, 3] = 1998 if int(wrong[0, 3]) != 1998 else 2030
    assert float(signal.apart(rows_of(minilm, signal, wrong))[0]) > 10 * FILLED


@pytest.mark.minilm
def test_a_head_that_looks_past_tokens_is_left_out(minilm):
    batch = sample_batch(minilm, 4, 1)
    seen = seen_of(minilm, batch, "1:o")
    whole = signal_of(seen)
    assert whole is not None
    assert whole.heads is not None
    (name, sent), width = next(iter(seen.tensors.items())), minilm.head_width
    sent = sent.clone()
    dull = sent[:, 5 * width : 6 * width]
    left, _, right = torch.linalg.svd(dull.double(), full_matrices=False)
    dull.copy_((left[:, :3] @ right[:3]).float() * dull.norm())  # a head of three directions
    signal = signal_of(replace(seen, tensors={**seen.tensors, name: sent}))
    assert signal is not None
    assert signal.heads is not None
    assert signal.rank == whole.rank
    assert set(signal.heads.tolist()) == set(whole.heads.tolist()) - {5}


@pytest.mark.minilm
def test_more_tokens_than_a_head_is_wide_leave_nothing_to_read_in_attention_output(minilm):
    batch = make_batch(minilm, ["the cat sat on the mat and " * 6], [1])
    assert batch.tokens > minilm.head_width
    assert signal_of(seen_of(minilm, batch, "1:o")) is None


# of a matrix whose entries have errors of their own


def test_what_errors_make_of_right_rows_is_taken_off():
    signal, rows = space(4), drawn(4, 20)
    assert float(replace(signal, blur=0.25).apart(rows)) == pytest.approx(float(signal.apart(rows)) - 0.25)


def test_rows_count_in_the_scale_of_the_space_and_all_words_are_kept_without_it(folders):
    model = tiny_models.tiny(folders["bert"])
    ids = torch.tensor([model.tokens("the cat sat on a mat")[:7]])
    plain = Signal(1, "q", torch.eye(model.width)[None], differences=False)
    scale = torch.linspace(0.5, 2, model.width, dtype=torch.double)
    scaled = replace(plain, scale=scale)
    assert torch.allclose(rows_of(model, scaled, ids), rows_of(model, plain, ids) * scale.float())
    first = word_rows(model, scaled)  # made in the scale before any without
    kept = word_rows(model, plain)
    assert torch.allclose(kept.rows, word_rows(tiny_models.tiny(folders["bert"]), plain).rows)
    assert torch.allclose(first.rows, kept.rows * scale.float())
    assert torch.allclose(word_rows(model, scaled).rows, kept.rows * scale.float())
    assert torch.allclose(word_rows(model, scaled).squares, (kept.rows * scale.float()).square().sum(1))
    assert word_rows(model, plain) is kept


@pytest.mark.minilm
@pytest.mark.parametrize(
    ("selection", "how"),
    [
        ("1:q", LocalTraining("adamw", 5e-5)),
        ("2:k", LocalTraining("adamw", 1e-5, weight_decay=0.1)),
        ("3:f", LocalTraining("sgd", 1e-2)),
        ("1:p", LocalTraining("adam", 1e-4)),
        ("1:v", LocalTraining("none", precision="bf16")),
    ],
)
def test_one_matrix_of_a_step_gives_the_sentence_and_proves_it(minilm, selection: str, how: LocalTraining):
    batch = sample_batch(minilm, 4, 1)
    found = read(seen_of(minilm, batch, selection, training=how))
    assert found.sequences == tuple(map(tuple, batch.sequences()))
    assert found.certificates == ("proven",)
    assert batch.labels is not None
    assert found.labels == tuple(batch.labels.tolist())
    assert found.details["chi2"] < 1.1
    assert f"block {selection[0]}'s" in found.notes[0]


@pytest.mark.minilm
def test_a_step_of_which_nothing_was_told_is_read_from_one_matrix(minilm):
    batch = sample_batch(minilm, 4, 1)
    seen = seen_of(minilm, batch, "1:q", Given(training=False, dropout=False), training=LocalTraining("adamw", 5e-5))
    found = read(seen)
    assert found.sequences == tuple(map(tuple, batch.sequences()))


@pytest.mark.minilm
def test_directions_of_a_step_that_errors_made_are_left_out(minilm):
    batch = sample_batch(minilm, 4, 1)
    found = most_telling.signal_of(
        seen_of(minilm, batch, "1:q", training=LocalTraining("adamw", 1e-5)), stream(0, "attack")
    )
    assert found is not None
    signal, block = found
    assert block is not None
    assert block.span is not None
    assert signal.rank == batch.tokens < block.span.rank
    assert 0 < signal.blur < 10 * FILLED
    assert float(signal.apart(rows_of(minilm, signal, batch.ids))[0]) < FILLED
    wrong = batch.ids.clone()
    wrong[0, 3] = 1998 if int(wrong[0, 3]) != 1998 else 2030
    assert float(signal.apart(rows_of(minilm, signal, wrong))[0]) > 10 * FILLED


@pytest.mark.minilm
def test_of_doubtful_directions_shorter_sentences_are_looked_for_first(minilm, search):
    signal = replace(search.signal, doubtful=2)
    one = batch_file.BatchSearch(minilm, signal, 1, None, 64, stream(0, "attack"))
    whole = signal.rank
    assert list(one._lengths(1)) == [(whole - 2, True), (whole - 1, True), (whole, True)]
    unsure = batch_file.BatchSearch(minilm, replace(signal, blur=1e-3), 1, None, 64, stream(0, "attack"))
    assert [length for length, _ in unsure._lengths(1)] == [whole - 2, whole - 1, whole, whole - 3]
    few = batch_file.BatchSearch(minilm, replace(space(3), doubtful=2), 1, None, 64, stream(0, "attack"))
    assert list(few._lengths(1)) == [(3, True)]
    none = batch_file.BatchSearch(minilm, space(2), 1, None, 64, stream(0, "attack"))
    assert list(none._lengths(1)) == []
    unknown = batch_file.BatchSearch(minilm, space(2), None, None, 64, stream(0, "attack"))
    assert list(unknown._lengths(1)) == []


@pytest.mark.minilm
def test_a_sentence_beside_a_direction_of_errors_is_found(minilm, search, sentence):
    """Its rows lie in the space, which has one direction more than they are."""
    signal = search.signal
    other = torch.linalg.qr(torch.cat([signal.basis[0], drawn(minilm.width, 1)], 1))[0]
    wider = replace(signal, basis=other[None], doubtful=1)
    one = batch_file.BatchSearch(minilm, wider, 1, None, 64, stream(0, "attack"))
    one.run()
    assert [fit.tokens.tolist() for fit in one.found] == [sentence.tolist()]


def test_directions_are_kept_doubted_or_left_out_by_what_they_lose(load, monkeypatch):
    """A stand-in for the fit, whose directions lose what is asked here."""
    model = load("bert")
    basis = torch.linalg.qr(drawn(model.width, 4))[0]
    lost = torch.tensor([1e-6, 2e-3, 2e-2, 0.5], dtype=torch.double)
    fitted = Span(basis, torch.ones(4), 4, 1.0, 1, (), lost, torch.ones(model.width))

    class Fitted:
        span, keys = fitted, ((1, "k"),)

        def __init__(self, *given: object) -> None: ...

    monkeypatch.setattr(most_telling, "ReadBlock", Fitted)
    batch = tiny_models.batch_of(model, ["the cat sat"], [1])
    signal = signal_of(seen_of(model, batch, "1:k", training=LocalTraining("sgd", 0.1)))
    assert signal is not None
    assert torch.equal(signal.basis[0], basis[:, :3])
    assert (signal.doubtful, signal.differences, signal.roles) == (2, True, "k")
    assert signal.blur == pytest.approx(3 * float(lost[:3].sum()))


def test_steps_that_do_not_add_up_are_not_taken_for_a_gradient(load):
    """At a large rate their change's rank stands far above rounding, and is of no one sentence's rows."""
    model = load("bert")
    batch = tiny_models.batch_of(model, ["the cat sat"], [1])
    steps = seen_of(model, batch, "1:q", training=LocalTraining("sgd", 1e3, epochs=2, momentum=0.9))
    assert most_telling.span(steps, 1).rank < model.width
    assert signal_of(steps) is None


@pytest.mark.minilm
def test_another_sentence_than_the_step_s_is_not_proven(minilm, monkeypatch):
    """The judge of the search is fooled; what the sentence explains is not."""
    batch, other = sample_batch(minilm, 4, 1), sample_batch(minilm, 30, 1)
    monkeypatch.setattr(SentenceSearch, "run", lambda self, *given: Fit(other.ids[0], 0.0))
    found = read(seen_of(minilm, batch, "1:q", training=LocalTraining("adamw", 5e-5)))
    assert found.sequences == (tuple(other.sequences()[0]),)
    assert found.certificates == ("likely",)


@pytest.mark.minilm
def test_where_no_sentence_of_a_step_fits_the_nearest_is_a_guess_and_nothing_is_said_of_proofs(minilm, monkeypatch):
    batch = sample_batch(minilm, 4, 1)
    monkeypatch.setattr(SentenceSearch, "run", lambda self, *given: Fit(batch.ids[0], 1.0))
    found = read(seen_of(minilm, batch, "1:q", training=LocalTraining("adamw", 5e-5)))
    assert found.certificates == ("guess",)
    assert not any("proven" in note for note in found.notes)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adam"])
@pytest.mark.parametrize("selection", ["1:q", "0:k", "1:f", "0:p"])
def test_of_any_step_an_attack_ends_with_an_answer_or_a_reason_and_proves_no_other_sentence(load, selection, optimizer):
    """Adam's own eps leaves of a tiny model's gradients little but signs."""
    for seed, family in enumerate(("bert", "roberta", "electra")):
        model = load(family)
        batch = tiny_models.batch_of(model, tiny_models.sentences((1 + 2 * seed,), seed), [1])
        try:
            found = read(seen_of(model, batch, selection, training=LocalTraining(optimizer, 1e-3)))
        except NotSupportedError:
            continue
        proven = {s for s, sure in zip(found.sequences, found.certificates or (), strict=True) if sure == "proven"}
        assert proven <= set(map(tuple, batch.sequences()))


@pytest.mark.minilm
def test_noise_over_all_but_two_directions_leaves_no_sentence_to_look_for(minilm):
    noise = build("defense", "gaussian", {"sigma": 1e-4})
    found = read(seen_of(minilm, sample_batch(minilm, 4, 1), "1:q", defenses=(noise,)))
    assert found.sequences == ()
    assert "fewer than a sentence has tokens" in found.notes[-1]


@pytest.mark.minilm
def test_noise_that_tells_no_space_ends_in_a_sentence_that_says_what_is_needed(minilm):
    noise = build("defense", "gaussian", {"sigma": 1.0})
    with pytest.raises(NotSupportedError, match="a matrix of any block"):
        read(seen_of(minilm, sample_batch(minilm, 4, 1), "1:q", defenses=(noise,)))


@pytest.mark.minilm
def test_special_tokens_are_no_words(minilm, search):
    count = len(search.places)
    found = search._shares_of_all(torch.zeros(count, minilm.width), search.words.rows[:2], [None] * count)
    assert bool((found[:, sorted(minilm.special.ids)] == -1).all())
    assert float(found[:, 2000].min()) >= 0


@pytest.mark.minilm
def test_a_defense_that_leaves_a_matrix_alone_leaves_the_sentence_and_no_proof(minilm):
    batch = sample_batch(minilm, 4, 1)
    found = read(seen_of(minilm, batch, "*:*", defenses=(build("defense", "aegis", {}),)))
    assert found.sequences == tuple(map(tuple, batch.sequences()))
    assert found.certificates == ("likely",)
    assert found.notes[0] == "read from block 0's p alone"


@pytest.mark.minilm
def test_a_clipped_gradient_is_read_and_is_no_proof(minilm):
    batch = sample_batch(minilm, 4, 1)
    defense = build("defense", "clip", {"norm": 1e-3})
    found = read(seen_of(minilm, batch, "1:q", defenses=(defense,)))
    assert found.sequences == tuple(map(tuple, batch.sequences()))
    assert found.certificates == ("likely",)


@pytest.mark.minilm
@pytest.mark.parametrize(("selection", "how"), [("5:f", {}), ("2:f", {"dropout": True})])
def test_where_nothing_can_be_read_it_says_what_is_needed(minilm, selection: str, how):
    with pytest.raises(NotSupportedError, match="a matrix of any block of a gradient or a step") as refusal:
        read(seen_of(minilm, sample_batch(minilm, 4, 1), selection, Given(batch_size=False), **how))
    assert ("dropout was on" in str(refusal.value)) == bool(how)


# dropout on


def under_masks(model, batch: Batch, selection: str, rate: float = 0.1) -> Observation:
    return tiny_models.seen_of(Client(model, dropout=True, dropout_rate=rate), batch, selection)


@pytest.mark.minilm
@pytest.mark.parametrize("selection", ["0:k", "0:f", "1:q"])
def test_dropout_on_one_matrix_gives_the_sentence_and_does_not_prove_it(minilm, selection: str):
    batch = tiny_models.batch_of(minilm, ["The river was cold that morning."], [1])
    found = read(under_masks(minilm, batch, selection))
    assert found.sequences == tuple(map(tuple, batch.sequences()))
    assert found.certificates == ("likely",)
    assert MASKED in found.notes


@pytest.mark.minilm
@pytest.mark.parametrize("selection", ["1:q", "2:k", "1:o", "2:p"])
def test_masks_that_are_drawn_are_as_far_as_the_client_s_and_a_wrong_word_is_farther(minilm, selection: str):
    batch = tiny_models.batch_of(minilm, ["The river was cold that morning."], [1])
    right = batch.ids[0]
    signal = signal_of(under_masks(minilm, batch, selection))
    assert signal is not None
    wrong = right.clone()
    wrong[4] = 1998 if int(right[4]) != 1998 else 2030
    near, far = (Fit(one, float(signal.apart(rows_of(minilm, signal, one[None]))[0])) for one in (right, wrong))
    masked = DrawnMasks(minilm, 0.1, stream(0, "masks"))
    assert near.apart > FILLED
    assert masked.likely(signal, near)
    assert masked.surprise(signal, near) == masked.surprise(signal, near)
    assert masked.surprise(signal, far) > masked.surprise(signal, near) + 2
    assert not DrawnMasks(minilm, 1e-9, stream(0, "masks")).likely(signal, near)
    drawn = [DrawnMasks(minilm, rate, stream(0, "masks"))._drawn(signal, right).mean() for rate in (1e-9, 0.05, 0.1)]
    assert 0 <= drawn[0] < 1e-6 < drawn[1] < drawn[2]
    others = replace(signal, basis=torch.cat([signal.basis, torch.zeros_like(signal.basis)], 2))
    lost = signal.rank / (signal.basis.shape[1] - signal.rank)
    again = DrawnMasks(minilm, 0.1, stream(0, "masks"))._drawn(others, right).mean()
    assert float(again / drawn[2]) == pytest.approx(1 - lost, rel=0.01)


def test_masks_are_drawn_at_the_rate_of_each_place_and_keep_the_mean(load):
    left = DrawnMasks(load("bert"), 0.1, stream(0, "masks"))._drop(0, torch.ones(200, 200), 0.3)
    assert float((left == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert left.unique().tolist() == pytest.approx([0.0, 1 / 0.7])


@pytest.mark.minilm
def test_dropout_on_a_pair_is_read_and_of_likely_lengths_the_likeliest_is_taken(minilm):
    batch = tiny_models.batch_of(minilm, ["The river was cold.", "Nobody answered her letters."], [1, 0])
    found = read(under_masks(minilm, batch, "1:q"))
    assert set(found.sequences) == set(map(tuple, batch.sequences()))
    assert set(found.certificates or ()) <= {"likely", "guess"}


@pytest.mark.minilm
@pytest.mark.parametrize("dropout", [True, False])
def test_where_the_word_table_names_the_words_no_others_are_tried(minilm, dropout: bool, monkeypatch):
    batch = tiny_models.batch_of(minilm, ["The river was cold.", "Nobody answered her letters."], [1, 0])
    tried: list[int] = []

    def watched(model, signal, around, places, words):
        tried.extend(words.flatten().tolist())
        return rows_among(model, signal, around, places, words)

    monkeypatch.setattr(search_file, "rows_among", watched)
    client = Client(minilm, dropout=dropout)
    found = read(tiny_models.seen_of(client, batch, "1:q embeddings"))
    assert set(found.sequences) == set(map(tuple, batch.sequences()))
    assert tried
    assert set(tried) <= set(batch.ids[batch.mask.bool()].tolist()) - minilm.special.ids


def test_words_that_no_sentence_holds_are_special_ones_and_those_that_are_known_to_be_missing(load):
    model = load("bert")
    special = sorted(model.special.ids)
    assert barred_words(model, None).tolist() == special
    held = [token for token in (7, 9) if token not in special]
    barred = barred_words(model, torch.tensor([*special, *held])).tolist()
    assert barred == [token for token in range(model.vocabulary_size) if token not in held]


def test_a_sentence_farther_than_masks_put_the_right_one_is_a_guess(load, monkeypatch):
    model = load("bert")
    monkeypatch.setattr(DrawnMasks, "likely", lambda *_: False)
    found = read(under_masks(model, tiny_models.batch_of(model, ["the cat sat on a mat"], [0]), "1:q"))
    assert found.certificates == ("guess",)
    assert UNLIKE_MASKED in found.notes


def test_matrices_that_read_the_same_are_read_together_and_the_first_block_comes_first(load):
    model = load("bert")
    batch = tiny_models.batch_of(model, ["the cat sat", "a dog ran off"], [0, 1])
    signal = signal_of(seen_of(model, batch, "1:k,v 0:f,p"))
    assert signal is not None
    assert (signal.keys, signal.differences) == ([(1, "k"), (1, "v")], False)
    signal = signal_of(seen_of(model, batch, "1:k 0:p"))
    assert signal is not None
    assert (signal.keys, signal.differences) == ([(1, "k")], True)
    assert signal_of(seen_of(model, batch, "embeddings")) is None
