"""A decoder's sentences from its words: each query's signal lies among the keys before it, and nowhere else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.leakage.decoding.past import read_sentences
from gradaudit.leakage.decoding.word_signals import WordSignals
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.streams import stream
from gradaudit.types import LocalTraining
from tiny_models import batch_of, seen_of, sentences, tiny

HEADS, GROUP, SIZE, ERROR = 4, 2, 32, 1e-4


def turned(vectors: Tensor, positions: Tensor) -> Tensor:
    """Turn pairs of coordinates by angles that go with the position."""
    angles = positions[:, None, None] * torch.exp(-torch.arange(SIZE // 2, dtype=torch.double) / 3)
    one, other = vectors.chunk(2, 2)
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], 2)


def made(
    texts: list[list[int]], words: int, faint: int | None = None, deaf: int | None = None, balanced: bool = True
) -> WordSignals:
    """Return the signals of some texts of numbered words, summed over the places of each, with errors.

    Of one word's query, or of one word's key, the error is as large as the signal. What comes back to a query's scores
    sums to zero, or is anything where not `balanced`, but for a first word's, which is zero.
    """
    rng = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(words, n, SIZE, generator=rng).double() for n in (HEADS, HEADS // GROUP))
    toward_q, toward_k = torch.zeros_like(queries), torch.zeros_like(keys)
    for text in texts:
        place, index = torch.arange(len(text)), torch.tensor(text)
        q, k = turned(queries[index], place), turned(keys[index], place).repeat_interleave(GROUP, 1)
        inside = torch.ones(len(text), len(text)).tril().double()
        weights = torch.randn(HEADS, len(text), len(text), generator=rng).double() * inside
        if balanced:
            weights = weights - inside * weights.sum(2, keepdim=True) / inside.sum(1)[:, None]
        weights[:, 0] = 0
        back_q = turned(torch.einsum("hij,jhd->ihd", weights, k), -place)
        back_k = turned(torch.einsum("hij,ihd->jhd", weights, q), -place)
        toward_q.index_add_(0, index, back_q)
        toward_k.index_add_(0, index, back_k.view(len(text), HEADS // GROUP, GROUP, SIZE).sum(2))
    errors = [torch.full_like(t, ERROR) for t in (toward_q, toward_k)]
    if faint is not None:
        errors[0][faint] = toward_q[faint].square().mean().sqrt()
    if deaf is not None:
        errors[1][deaf] = toward_k[deaf].square().mean().sqrt()
    noisy = [t + e * torch.randn(t.shape, generator=rng) for t, e in zip((toward_q, toward_k), errors, strict=True)]
    return WordSignals(noisy[0], noisy[1], *errors, queries, keys, turned, balanced=balanced)


TEXTS = {
    "apart": [[0, 1, 2, 3, 4], [5, 6, 7]],
    "the same beginning": [[0, 1, 2, 3], [0, 1, 4, 5]],
    "the same end": [[0, 1, 2, 9], [3, 4, 5, 9], [6, 7, 8, 9]],
    "a word inside and at the end": [[0, 1, 6, 2, 3, 6], [4, 5, 6]],
    "a run that comes again": [[0, 1, 2, 3, 4, 1, 2, 5, 6], [7, 8]],
    "a first word that comes again": [[0, 1, 2], [3, 0, 4]],
}


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("texts", TEXTS.values(), ids=TEXTS.keys())
def test_sentences_are_found_and_each_is_certain(texts: list[list[int]], balanced: bool):
    tree = read_sentences(made(texts, 1 + max(word for text in texts for word in text), balanced=balanced))
    assert set(tree.sentences()) == {tuple(text) for text in texts}
    assert all(tree.certain(tuple(text)) for text in texts)


def test_scores_that_are_bent_are_not_taken_for_plain_ones():
    told = made([[0, 1, 2, 3, 4], [5, 6, 7]], 8, balanced=False)
    tree = read_sentences(replace(told, balanced=True))
    assert not any(map(tree.certain, tree.sentences()))


def test_a_key_tells_the_few_words_behind_it_and_none_that_are_not():
    told = made([[0, 1, 2, 3], [4, 5, 3, 2]], 6)
    assert told.behind(1, [2, 3], 3) == (2, 3)
    assert told.tells(1, (2, 3))
    assert not told.tells(1, (3, 2)), "in the other order"
    assert not told.tells(1, (2,)), "one more follows"
    assert not told.tells(1, (2, 3, 2)), "the last is not there"
    assert told.behind(1, [3, 5], 3) == ()
    longer = made([[0, 1, 2, 3, 4], [5, 6, 4, 3, 2]], 7)
    assert longer.behind(1, [2, 3, 4], 3) == (2, 3, 4)
    assert not longer.tells(1, (2, 3, 4)), "of many words some explain any key: three are no proof"
    assert not made([[0, 1, 2], [3, 4, 5]], 6).tells(1, (2, 5)), "one word too many explains as well"
    alone = made([[0, 1], [2, 3]], 4)
    assert alone.behind(1, [0, 2, 3], 3) == (), "nothing follows"
    assert alone.tells(1, ())
    faint = made([[0, 1, 2, 3], [4, 5, 3, 2]], 6, deaf=1)
    assert faint.behind(1, [2, 3], 3) == (), "a signal of the size of its error would be explained by too much"


def test_two_words_that_end_two_sentences_are_put_to_both():
    """Neither's place can be told alone: each word's query sums over two places."""
    texts = [[0, 1, 2, 7, 8], [3, 4, 5, 6, 7, 8]]
    tree = read_sentences(made(texts, 9))
    assert set(tree.sentences()) == {tuple(text) for text in texts}
    assert all(tree.certain(tuple(text)) for text in texts)


def test_a_word_alone_may_end_any_sentence():
    tree = read_sentences(made([[0], [1, 2]], 3))
    assert set(tree.sentences()) == {(0,), (1, 2)}
    assert not any(map(tree.certain, tree.sentences()))


def test_an_order_that_was_not_sent_is_not_certain():
    """Swap control: the signals are those of another order of the same words."""
    told = made([[0, 1, 2, 3, 4]], 5)
    tree = read_sentences(told)
    assert not tree.told.unexplained([2], [[(1, 0)]])[0] < 100
    assert not tree.told.unexplained([3], [[(0, 1, 2, 4)]])[0] < 100
    wrong = replace(told, keys=told.keys.flip(0))
    assert not any(map(read_sentences(wrong).certain, read_sentences(wrong).sentences()))


def test_a_word_whose_signal_is_hardly_above_its_error_is_left_open():
    """A signal of the size of its error would be explained by too much."""
    tree = read_sentences(made([[0, 1, 2, 3, 4]], 5, faint=3))
    assert not any(map(tree.certain, tree.sentences()))


def test_where_a_key_is_hardly_known_a_word_may_follow():
    """The last word stands in three places, and the key before one of them would not show it."""
    tree = read_sentences(made([[0, 1, 2, 9], [3, 4, 5, 9], [6, 7, 8, 9]], 10, deaf=2))
    assert set(tree.sentences()) == {(0, 1, 2), (3, 4, 5, 9), (6, 7, 8, 9)}, "one is short of a word"
    assert not tree.certain((0, 1, 2))
    assert tree.certain((3, 4, 5, 9))


def test_a_past_that_fills_what_a_norm_leaves_of_a_head_explains_nothing():
    """Behind a norm one coordinate has no signal, here the first: one word fewer can explain anything."""
    kept = torch.ones(SIZE, dtype=torch.double)
    kept[0] = 0
    told = made([list(range(SIZE + 8))], SIZE + 8)
    normed = replace(told, toward_queries=told.toward_queries * kept, returned=lambda _, __, slopes: slopes * kept)
    wrong = tuple(range(5, 5 + SIZE - 1))
    assert normed.unexplained([SIZE + 7], [[wrong]])[0] < 1
    assert replace(normed, lost=1).unexplained([SIZE + 7], [[wrong]])[0] == math.inf
    assert 100 < replace(normed, lost=1).unexplained([SIZE + 7], [[wrong[1:]]])[0] < math.inf


@pytest.fixture(scope="module")
def llama():
    return load_model(ModelSpec("random:llama-small", "classification", 2))


# weights drawn at random send gradients far above the usual eps: all would be signs
STEPS = [LocalTraining("adamw", 5e-5, weight_decay=0.01, eps=1e-4), LocalTraining("sgd", 1e-2)]


@pytest.mark.parametrize("training", STEPS, ids=["adamw", "sgd"])
def test_one_step_of_a_rotary_model_is_read_exactly_and_proven(llama, training: LocalTraining):
    texts = ["The nurse called Miriam at nine.", "A train to Lisbon left late, and the train was full."]
    batch = make_batch(llama, texts, [0, 1])
    found = Decode()(seen_of(Client(llama, training), batch, "0:q,k,v"), stream(0, "attack"))
    assert set(found.sequences) == {tuple(text) for text in batch.sequences()}
    assert found.certificates == ("proven", "proven")


def test_without_keys_a_rotary_models_words_come_without_order(llama):
    batch = make_batch(llama, ["The nurse called Miriam at nine."], [0])
    found = Decode()(seen_of(Client(llama, STEPS[1]), batch, "0:q,v"), stream(0, "attack"))
    assert found.certificates == ("guess",)
    assert set(found.sequences[0]) == set(batch.sequences()[0])


OTHERS = {
    "qwen3": {},
    "phi": {"qk_layernorm": True},
    "phi3": {},
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 0.5},
    "gemma3_text": {},
}
"""Decoders that normalize heads, turn a part of each, keep q, k and v in one matrix, or bend scores: hard ones."""


@pytest.mark.parametrize("family", OTHERS)
def test_one_step_of_other_rotary_models_is_read_exactly_and_proven(folders, tmp_path, family: str):
    """Behind their norms, too, a query's slopes lie among the keys before it, and a key's among the queries behind."""
    config = AutoConfig.from_pretrained(folders[family])
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "initializer_range": 0.05}
    config.update(OTHERS[family] | sizes)  # of wider ones attention sees one word alone, and nothing comes back
    config.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folders[family]).save_pretrained(tmp_path)
    model = tiny(tmp_path)  # norms are drawn, too
    batch = batch_of(model, sentences((6, 4), 5))
    found = Decode()(seen_of(Client(model, LocalTraining("sgd", 1e-2)), batch, "0:q,k,v"), stream(0, "attack"))
    assert set(found.sequences) == {tuple(text) for text in batch.sequences()}
    assert found.certificates == ("proven", "proven")
