"""Exact decoding on the real MiniLM with dropout on: exact, certified, and silent where it must be."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import gradaudit.attacks.decode as attack_file
import gradaudit.leakage.decoding.explain as explain_file
import tiny_models
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.leakage.decoding.assembly import Solved
from gradaudit.leakage.decoding.explain import Explained
from gradaudit.leakage.decoding.sentences import DecodedRows
from gradaudit.leakage.decoding.taking_out import take_out
from gradaudit.leakage.rowspace.deflation import Remainder, matrices, remainder
from gradaudit.leakage.rowspace.growth import Grown
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Batch, Given, LocalTraining, Observation
from made_data import sample_batch

pytestmark = pytest.mark.minilm


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


def seen_of(model, batch: Batch, given: Given | None = None, selection: str = "0:q,k,v", **how) -> Observation:
    client = Client(model, **({"dropout": True, "freeze": ("embeddings",)} | how))
    return tiny_models.seen_of(client, batch, selection, given or Given(), 3)


def truth(batch: Batch) -> set[tuple[int, ...]]:
    return {tuple(s) for s in batch.sequences()}


@pytest.mark.parametrize(("first", "size"), [(4, 1), (8, 2), (12, 4)])
def test_the_practical_setting_is_read_back_exactly_and_proven(minilm, first: int, size: int):
    batch = sample_batch(minilm, first, size)
    found = Decode()(seen_of(minilm, batch), stream(0, "attack"))
    assert set(found.sequences) == truth(batch)
    assert found.certificates == ("proven",) * size
    assert found.details["estimated_dropout"] == pytest.approx(0.1, abs=0.02)


def test_nothing_beside_the_gradient_need_be_given(minilm):
    batch = sample_batch(minilm, 20, 2)
    nothing = Given(batch_size=False, training=False, dropout=False, defenses=False)
    found = Decode()(seen_of(minilm, batch, nothing), stream(0, "attack"))
    assert set(found.sequences) == truth(batch)


def test_the_same_words_twice_are_told_apart(minilm):
    text = "Rufus owes Clara 900 euros."
    batch = make_batch(minilm, [text, text, "Tobias owes Clara nothing."], [0, 1, 1])
    found = Decode()(seen_of(minilm, batch), stream(0, "attack"))
    assert sorted(found.sequences) == sorted(tuple(s) for s in batch.sequences())


def test_swapped_gradients_give_their_own_text_and_not_another_batch(minilm):
    mine, other = sample_batch(minilm, 4, 2), sample_batch(minilm, 30, 2)
    found = Decode()(seen_of(minilm, other), stream(0, "attack"))
    assert not set(found.sequences) & truth(mine)


def test_pure_noise_proves_nothing(minilm):
    seen = seen_of(minilm, sample_batch(minilm, 4, 2))
    rng = torch.Generator().manual_seed(0)
    noise = {n: torch.randn(t.shape, generator=rng) * t.norm() / t.numel() ** 0.5 for n, t in seen.tensors.items()}
    found = Decode()(dataclasses.replace(seen, tensors=noise), stream(0, "attack"))
    assert "proven" not in (found.certificates or ())
    assert found.sequences == ()
    assert any("not identifiable" in note for note in found.notes)


def test_a_sentence_with_a_foreign_token_is_not_proven(minilm):
    # two updates added up, of which one is without dropout: half of the rows cannot be decoded
    noisy = seen_of(minilm, sample_batch(minilm, 4, 1))
    plain = seen_of(minilm, sample_batch(minilm, 30, 1), dropout=False)
    mixed = {n: t + plain.tensors[n] for n, t in noisy.tensors.items()}
    found = Decode()(dataclasses.replace(noisy, tensors=mixed), stream(0, "attack"))
    right = truth(sample_batch(minilm, 4, 1)) | truth(sample_batch(minilm, 30, 1))
    proven = [s for s, c in zip(found.sequences, found.certificates or (), strict=True) if c == "proven"]
    assert set(proven) <= right


def test_without_attention_gradients_it_says_what_is_missing(minilm):
    with pytest.raises(NotSupportedError, match="block 0"):
        Decode()(seen_of(minilm, sample_batch(minilm, 4, 1), selection="head"), stream(0, "attack"))


def test_values_alone_give_the_words_of_one_sentence_in_order_and_no_proof(minilm):
    batch = sample_batch(minilm, 4, 1)
    found = Decode()(seen_of(minilm, batch, selection="0:v"), stream(0, "attack"))
    assert set(found.sequences) == truth(batch)
    assert found.certificates == ("likely",)
    assert any("gradients of 0:q and 0:k were not seen" in note for note in found.notes)
    found = Decode()(seen_of(minilm, batch, selection="0:q,v"), stream(0, "attack"))
    assert any("gradients of 0:k were not seen" in note for note in found.notes)


@pytest.mark.parametrize(("first", "size"), [(4, 1), (12, 4), (0, 8)])
def test_dropout_off_is_read_back_exactly_and_proven_with_labels(minilm, first: int, size: int):
    batch = sample_batch(minilm, first, size)
    found = Decode()(seen_of(minilm, batch, selection="0-2:q,k,v", dropout=False, freeze=()), stream(0, "attack"))
    assert sorted(found.sequences) == sorted(tuple(s) for s in batch.sequences())
    assert found.certificates == ("proven",) * size
    assert batch.labels is not None
    assert found.labels is not None
    given = dict(zip(map(tuple, batch.sequences()), batch.labels.tolist(), strict=True))
    assert dict(zip(found.sequences, found.labels, strict=True)) == given


def test_dropout_off_needs_neither_the_rate_nor_the_batch_size(minilm):
    batch = sample_batch(minilm, 20, 2)
    nothing = Given(batch_size=False, training=False, dropout=False, defenses=False)
    seen = seen_of(minilm, batch, nothing, selection="0-1:q,k,v", dropout=False, freeze=())
    found = Decode()(seen, stream(0, "attack"))
    assert set(found.sequences) == truth(batch)
    assert found.certificates == ("proven",) * 2


def test_a_clipped_gradient_is_read_with_the_share_that_it_tells(minilm):
    batch = sample_batch(minilm, 20, 2)
    client = Client(minilm, defenses=(build("defense", "clip", {"norm": 1e-2}),))
    for given in (Given(), Given(batch_size=False)):
        seen = tiny_models.seen_of(client, batch, "0-2:q,k,v", given, 0)
        found = Decode()(seen, stream(0, "attack"))
        assert set(found.sequences) == truth(batch)
        assert found.certificates == ("proven",) * 2


def test_a_sentence_that_was_there_twice_is_answered_twice(minilm):
    some = sample_batch(minilm, 20, 2)
    twice = Batch(some.ids[[0, 1, 1]], some.mask[[0, 1, 1]], some.labels[[0, 1, 1]], ())
    seen = seen_of(minilm, twice, selection="0-2:q,k,v", dropout=False, freeze=())
    found = Decode()(seen, stream(0, "attack"))
    assert sorted(found.sequences) == sorted(map(tuple, twice.sequences()))
    assert found.certificates == ("proven",) * 3


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        *(((w, w), True) for w in (1024.0, 1e-6)),
        ((0.5, 1.5), True),
        ((1024.0, 1024.0), False),
        ((0.5, 1.5), False),
    ],
)
def test_a_scaled_or_weighted_loss_makes_no_copies(minilm, weights, told: bool):
    """Gradients that were added up instead of averaged, loss scaling, sentences that count differently."""
    batch = sample_batch(minilm, 20, 2)
    parts = [
        seen_of(minilm, sample_batch(minilm, at, 1), None, "0-2:q,k,v", dropout=False, freeze=()) for at in (20, 21)
    ]
    summed = {n: sum(w * p.tensors[n] for w, p in zip(weights, parts, strict=True)) for n in parts[0].tensors}
    whole = seen_of(minilm, batch, Given(batch_size=told), "0-2:q,k,v", dropout=False, freeze=())
    found = Decode()(dataclasses.replace(whole, tensors=summed), stream(0, "attack"))
    assert sorted(found.sequences) == sorted(truth(batch))
    assert found.certificates == ("proven",) * 2


def test_next_words_with_dropout_are_never_proven(load):
    model = load("gpt2", "causal-lm")
    batch = tiny_models.batch_of(model, tiny_models.sentences((5,), 1))
    seen = tiny_models.seen_of(Client(model, dropout=True), batch, "all", Given(), 0)
    found = Decode()(seen, stream(0, "attack"))
    assert "proven" not in (found.certificates or ()), "its last word is not in it"


def test_a_sentence_that_sends_next_to_nothing_is_not_proven_by_the_others(load, monkeypatch):
    model = load("llama")
    batch = tiny_models.batch_of(model, ["river stone", "moon of the"])
    right = [tuple(s) for s in batch.sequences()]
    monkeypatch.setattr(attack_file, "grow", lambda *_: Grown(right, 1))
    monkeypatch.setattr(explain_file, "explain", lambda *_: Explained((0, 1), 1e-7, (1.0, 3e-6)))
    found = Decode()(tiny_models.seen_of(Client(model), batch), stream(0, "attack"))
    assert found.certificates == ("proven", "likely")
    assert any("too little" in note for note in found.notes)


@pytest.mark.parametrize("selection", ["0:q", "0:v", "0:q,v"])
def test_with_dropout_on_sentences_are_put_together_without_queries_or_keys_and_not_proven(minilm, selection: str):
    batch = sample_batch(minilm, 12, 4)
    found = Decode()(seen_of(minilm, batch, selection=selection), stream(0, "attack"))
    assert set(found.sequences) == truth(batch)
    assert found.certificates == ("likely" if "q" in selection else "guess",) * 4
    assert any("none is proven" in note for note in found.notes)


@pytest.mark.parametrize("selection", ["0:q", "0:v", "0:q,k,v"])
def test_block_0_alone_proves_one_sentence_that_makes_its_gradient(minilm, selection: str):
    batch = sample_batch(minilm, 4, 1)
    found = Decode()(seen_of(minilm, batch, selection=selection, dropout=False, freeze=()), stream(0, "attack"))
    assert found.sequences == tuple(map(tuple, batch.sequences()))
    assert found.certificates == ("proven",)
    assert not any("only block 0" in note for note in found.notes)


def test_a_sentence_of_another_batch_cannot_be_taken_out(minilm):
    mine, other = sample_batch(minilm, 12, 3), sample_batch(minilm, 40, 3)
    seen = seen_of(minilm, mine, selection="0-2:q,k,v", dropout=False, freeze=())
    rest = remainder(matrices(seen, 3), 1.2e-7)
    for sentence in map(tuple, other.sequences()):
        assert take_out(minilm, rest, sentence, [1 / 3], [1, 2]) is None
    for sentence in map(tuple, mine.sequences()):
        taken = take_out(minilm, rest, sentence, [1 / 3], [1, 2])
        assert taken is not None
        assert taken.proven
        assert taken.share == 1 / 3
        wrong = (*sentence[:2], 2003 if sentence[2] != 2003 else 2004, *sentence[3:])
        assert take_out(minilm, rest, wrong, [1 / 3], [1, 2]) is None


def test_gpt2_with_dropout_before_its_normalization_is_read_back():
    model = load_model(ModelSpec("random:gpt2", layers=2))
    batch = sample_batch(model, 4, 2)
    found = Decode()(seen_of(model, batch, freeze=()), stream(0, "attack"))
    assert set(found.sequences) == truth(batch)
    assert found.certificates == ("proven",) * 2


def test_decoders_with_dropout_off_are_proven_by_explaining_the_whole_gradient(load):
    model = load("llama")
    batch = tiny_models.batch_of(model, ["river stone", "moon of the"])
    seen = tiny_models.seen_of(Client(model), batch)
    found = Decode()(seen, stream(0, "attack"))
    assert set(found.sequences) == truth(batch)
    assert found.certificates == ("proven",) * 2
    assert found.details["unexplained"] < 1e-4


@pytest.mark.parametrize("rate", [0.2, 0.3, 0.4])
def test_higher_rates(minilm, rate: float):
    batch = sample_batch(minilm, 12, 2)
    found = Decode()(seen_of(minilm, batch, dropout_rate=rate), stream(0, "attack"))
    assert set(found.sequences) == truth(batch)
    assert found.details["estimated_dropout"] == pytest.approx(rate, abs=0.03)


@pytest.mark.parametrize("rate", [0.3, 0.4])
def test_a_client_that_drops_more_than_is_told_is_read_and_nothing_is_proven_at_a_wrong_scale(minilm, rate: float):
    batch = sample_batch(minilm, 12, 2)
    seen = seen_of(minilm, batch, dropout_rate=rate)
    found = Decode()(replace(seen, knowledge=replace(seen.knowledge, dropout=0.1)), stream(0, "attack"))
    assert set(found.sequences) == truth(batch)
    assert set(found.certificates) == {"likely"}


@pytest.mark.parametrize(
    ("positions", "change", "complete"),
    [
        ([0, 1, 2, 3], {}, True),
        ([0, 1, 3, 4], {}, False),  # a hole
        ([1, 2, 3, 4], {}, False),  # the beginning is missing
        ([0, 1, 2, 3], {0: 2000}, False),  # does not start with [CLS]
        ([0, 1, 2, 3], {3: 2000}, False),  # does not end with [SEP]
        ([0, 1, 2, 3], {2: 102}, False),  # ends in its middle
    ],
)
def test_only_a_whole_sentence_is_complete(minilm, positions, change, complete):
    ids = [101, 2003, 2004, 102]
    for at, token in change.items():
        ids[at] = token
    assert DecodedRows.complete(SimpleNamespace(model=minilm), ids, positions) is complete


def one_wrong(sentences: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    first, *others = sentences
    return [(*first[:-1], first[-2]), *others]


def test_sentences_whose_ranks_did_not_fall_by_their_length_are_likely_and_their_labels_are_not_told(
    minilm, monkeypatch
):
    batch = sample_batch(minilm, 12, 3)
    seen = seen_of(minilm, batch, selection="0-2:q,k,v", dropout=False, freeze=())
    rest = remainder(matrices(seen, 3), 1.2e-7)
    solved = [Solved((101, 2003, 102), 1, False, (0.0, 1.0)), Solved((101, 2004, 102), 0, True, (1.0, 0.0))]
    monkeypatch.setattr(attack_file, "solve", lambda *_, **__: (solved, [(101, 2005, 102)], rest))
    monkeypatch.setattr(explain_file, "apart", lambda *_, **__: [])
    found = Decode()(seen, stream(0, "attack"))
    assert found.certificates == ("likely", "proven", "guess")
    assert found.labels is None


@pytest.mark.parametrize(("falls", "proven"), [((6, 6), True), ((6, 5), False), ((5, 6), False), ((7, 7), False)])
def test_taking_out_proves_only_when_every_rank_falls_by_exactly_the_length(minilm, monkeypatch, falls, proven):
    batch = sample_batch(minilm, 12, 2)
    rest = remainder(matrices(seen_of(minilm, batch, selection="0-2:q,k,v", dropout=False, freeze=()), 3), 1.2e-7)
    whole = rest.left

    def fallen(self: Remainder, layer: int) -> SimpleNamespace:
        return SimpleNamespace(rank=30 if self.left is whole else 30 - falls[layer - 1])

    monkeypatch.setattr(Remainder, "span", fallen)
    taken = take_out(minilm, rest, (101, 2003, 2004, 2005, 2006, 102), [1 / 2], [1, 2])
    assert taken is not None
    assert taken.proven is proven


@pytest.mark.parametrize("how", ["wrong", "missing", "delta", "right"])
def test_decoders_are_proven_only_when_all_of_one_gradient_is_explained(load, monkeypatch, how):
    model = load("llama")
    batch = tiny_models.batch_of(model, ["river stone", "moon of the"])
    training = LocalTraining("sgd", 0.1, 2) if how == "delta" else LocalTraining()
    seen = tiny_models.seen_of(Client(model, training), batch)
    right = [tuple(s) for s in batch.sequences()]
    told = {"wrong": one_wrong(right), "missing": right[:1]}.get(how, right)
    monkeypatch.setattr(attack_file, "grow", lambda *_: Grown(told, 1))
    found = Decode()(seen, stream(0, "attack"))
    assert found.certificates == ("proven" if how == "right" else "likely",) * len(told)
    assert (found.labels is not None) is (how == "right")


@pytest.mark.parametrize("field", ["candidates", "blocks", "starts", "most_words", "order_evaluations", "max_length"])
def test_counts_below_one_are_refused(field):
    with pytest.raises(BadInputError, match=f"{field} must be at least 1, got 0"):
        Decode(**{field: 0})


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(BadInputError, match="false_discoveries"):
        Decode(false_discoveries=float("nan"))


def test_one_position_looked_at_is_an_empty_answer_and_no_error(minilm):
    batch = sample_batch(minilm, 12, 2)
    found = Decode(max_length=1)(seen_of(minilm, batch, dropout=False, freeze=()), stream(0, "attack"))
    assert "proven" not in (found.certificates or ())
