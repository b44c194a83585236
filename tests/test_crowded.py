"""Batches that fill the row space, dropout on: their words, what came back to these, and sentences as guesses."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import gradaudit.attacks.decode as attack_file
import tiny_models
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.leakage.crowded import sentences as crowded
from gradaudit.leakage.crowded.attention_fit import AttentionFit
from gradaudit.leakage.crowded.sources import shares, sources
from gradaudit.leakage.crowded.words import present
from gradaudit.leakage.rowspace.subspace import span
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.streams import stream
from gradaudit.types import Given, Reconstruction
from made_data import sample_batch

WORDS, COORDINATES = 4000, 64


def masked_gradient(directions: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Return [200, d] of signals drawn for rows of which dropout took a tenth."""
    kept = torch.rand(directions.shape, generator=rng) > 0.1
    return torch.randn(200, len(directions), generator=rng).double() @ (directions * kept / 0.9).double()


def test_words_of_a_full_row_space_are_told_and_no_others():
    rng = torch.Generator().manual_seed(1)
    table = torch.randn(WORDS, COORDINATES, generator=rng)
    mine = torch.randperm(WORDS, generator=rng)[:30].repeat(3)  # 90 tokens on 64 coordinates
    found = present(table, torch.zeros(0, COORDINATES), torch.tensor([0]), masked_gradient(table[mine], rng), 0.02)
    assert len(set(found.tolist()) & set(mine.tolist())) >= 28
    assert len(set(found.tolist()) - set(mine.tolist())) <= 1


def test_noise_has_no_words():
    rng = torch.Generator().manual_seed(2)
    table = torch.randn(WORDS, COORDINATES, generator=rng)
    found = present(
        table, torch.zeros(0, COORDINATES), torch.tensor([0]), torch.randn(200, COORDINATES, generator=rng), 0.02
    )
    assert len(found) <= 1


def test_special_tokens_and_what_lies_beside_words_are_no_words():
    rng = torch.Generator().manual_seed(3)
    table = torch.randn(WORDS, COORDINATES, generator=rng)
    beside, never = torch.randn(2, COORDINATES, generator=rng), torch.tensor([5, 7])
    rows = torch.cat([table[[5, 7, 11, 13]], beside]).repeat(20, 1)
    found = present(table, beside, never, masked_gradient(rows, rng), 0.02)
    assert set(found.tolist()) == {11, 13}


def test_signals_without_noise_are_those_of_least_squares():
    rng = torch.Generator().manual_seed(4)
    directions = torch.randn(20, COORDINATES, generator=rng).double()
    signals = torch.randn(20, 100, generator=rng).double()
    found = sources(signals.T @ directions, directions, torch.ones(COORDINATES).double())
    assert torch.allclose(found, signals, atol=1e-3)


def test_of_blurred_rows_signals_come_nearer_than_by_plain_least_squares():
    rng = torch.Generator().manual_seed(5)
    directions, signals = torch.randn(50, COORDINATES, generator=rng), torch.randn(50, 100, generator=rng).double()
    rows = directions * (torch.rand(directions.shape, generator=rng) > 0.1) / 0.9
    gradient, exact = signals.T @ rows.double(), directions.double()
    found = sources(gradient, exact, exact.square().mean(0))
    plain = torch.linalg.lstsq(exact.T, gradient.T).solution
    assert (found - signals).norm() < 0.9 * (plain - signals).norm()


def test_a_word_of_one_place_has_its_share_there():
    rng = torch.Generator().manual_seed(6)
    words, place = torch.randn(24, 300, generator=rng).double(), torch.arange(24) % 6
    places = torch.zeros(6, 300).double().index_add(0, place, words)
    assert torch.equal(shares(words, places).argmax(1), place)


@pytest.mark.parametrize("family", tiny_models.ENCODERS)
def test_the_right_sentence_explains_what_came_back_and_a_strange_word_does_not(load, family: str):
    model = load(family)
    mine, other = (tiny_models.batch_of(model, [t]).sequences()[0] for t in tiny_models.sentences((9, 9), 5))
    words = [w for w in dict.fromkeys(mine) if w not in model.special.ids and list(mine).count(w) == 1]
    strange = next(w for w in other if w not in mine and w not in model.special.ids)
    ids = torch.tensor([list(mine)])
    made, mixed = model.first_attention(ids, torch.ones_like(ids, dtype=torch.bool))
    back = torch.autograd.grad(mixed, made, torch.randn(mixed.shape, generator=torch.Generator().manual_seed(0)))
    received = torch.cat([part[0] for part in back], 1)[[list(mine).index(w) for w in words]]
    fit = AttentionFit(model, words, received, torch.ones(3))
    replaced = [strange if w == words[0] else w for w in mine]
    turned = [*mine[:1], *mine[1:-1][::-1], *mine[-1:]]
    right, without, backwards = fit([mine, replaced, turned])
    at = [list(mine).index(w) for w in words]
    assert float(right[at].mean()) > 0.9
    assert float(without[at[1:]].mean()) < float(right[at[1:]].mean())
    assert float(backwards.sum()) < float(right.sum())
    assert float(without[at[0]]) == 0  # it is none of the words asked for


def test_sentences_of_several_lengths_are_held_against_each_by_itself(load):
    model = load("bert")
    several = [list(s) for s in tiny_models.batch_of(model, tiny_models.sentences((4, 9), 5)).sequences()]
    words = sorted({w for s in several for w in s} - model.special.ids)
    rng = torch.Generator().manual_seed(0)
    fit = AttentionFit(model, words, torch.randn(len(words), 3 * model.width, generator=rng), torch.ones(3))
    both = fit(several)
    for at, one in enumerate(several):
        assert torch.allclose(both[at, : len(one)], fit([one])[0], atol=5e-3)
    assert float(both[0, len(several[0]) :].abs().sum()) == 0


@pytest.mark.minilm
def test_more_tokens_than_coordinates_are_read_in_part_and_nothing_is_called_proven(monkeypatch):
    model = load_model(ModelSpec("minilm"))
    monkeypatch.setattr(crowded, "_TRIES", 32)
    batch = sample_batch(model, 0, 22)  # 392 tokens on 384 coordinates
    client = Client(model, dropout=True, freeze=("embeddings",))
    found = Decode()(tiny_models.seen_of(client, batch, "0:q,k,v", Given(), 3), stream(0, "attack"))
    assert found.certificates == ("guess",) * 22
    assert found.notes == (crowded.CROWDED,)
    mine = {w for s in batch.sequences() for w in s} - model.special.ids
    told = {w for s in found.sequences for w in s} - model.special.ids
    assert len(told & mine) > 0.8 * len(mine)
    assert len(told - mine) < 0.1 * len(told)
    # words that stand together in a guess stand together in a sentence, far more often than shuffled ones
    together = [set(s) for s in batch.sequences()]
    guesses = [[w for w in s if w not in model.special.ids] for s in found.sequences]

    def shared(guesses: list[list[int]]) -> int:
        return sum(any({a, b} <= s for s in together) for g in guesses for a, b in pairwise(g))

    every = [w for g in guesses for w in g]
    random.Random(0).shuffle(every)
    mixed = [[every.pop() for _ in g] for g in guesses]
    assert shared(guesses) > 2.5 * shared(mixed)


@pytest.mark.parametrize(
    ("selection", "given"), [("0:q,k", Given()), ("0:q,k,v", Given(batch_size=False)), ("0:q,k,v", Given())]
)
def test_only_with_queries_keys_values_and_the_batch_size_words_are_looked_for(load, monkeypatch, selection, given):
    model, asked = load("bert"), []

    def none(*arguments: object) -> torch.Tensor:
        asked.append(arguments)
        return torch.zeros(0, dtype=torch.long)

    monkeypatch.setattr(crowded, "present", none)
    batch = tiny_models.batch_of(model, tiny_models.sentences((9, 9), 5))
    seen = tiny_models.seen_of(Client(model, dropout=True), batch, selection, given)
    assert crowded.read_crowded(seen, stream(0, "attack")) is None
    assert bool(asked) == (selection == "0:q,k,v" and given.batch_size)


def test_what_a_defense_blurred_and_weight_changes_are_left_to_others(load, monkeypatch):
    model, answer = load("bert"), Reconstruction(notes=("read",))
    monkeypatch.setattr(attack_file, "read_crowded", lambda *arguments: answer)
    batch = tiny_models.batch_of(model, tiny_models.sentences((9, 9), 5))
    seen = tiny_models.seen_of(Client(model, dropout=True), batch, "0:q,k,v", Given())
    first = span(seen, 0)
    assert first is not None
    assert Decode()._crowded(seen, first, stream(0, "attack")) is answer
    blurred = replace(seen, knowledge=replace(seen.knowledge, defenses=({"name": "gaussian", "sigma": 1.0},)))
    for other in (blurred, replace(seen, kind="delta")):
        assert Decode()._crowded(other, first, stream(0, "attack")) is None


def test_more_words_than_a_sentence_has_are_not_searched(load):
    model = load("bert")
    words = list(range(5, 5 + crowded._PLACES + 1))
    assert crowded.in_order(None, model, words, stream(0, "attack"))[1:-1] == tuple(words)
