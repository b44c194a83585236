"""A decoder's sentences from one matrix: which matrices tell prefixes, how they grow, and what stays unknown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_models
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.decoding.explain import explain
from gradaudit.leakage.one_matrix import growing as growing_file
from gradaudit.leakage.one_matrix.growing import PrefixSearch, read_prefixes
from gradaudit.leakage.rowspace.deflation import matrices_of
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.models.transformers import TransformersModel
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining, Observation

FAMILIES = (*tiny_models.DECODERS, *tiny_models.NEWER_DECODERS)


def seen(model: TransformersModel, texts: list[str], selection: str, given: Given | None = None) -> Observation:
    return tiny_models.seen_of(Client(model), tiny_models.batch_of(model, texts), selection, given)


def telling_span(seen: Observation) -> Span | None:
    found = growing_file.telling_span(seen, stream(0, "attack"))
    return None if found is None else found[0]


def right(model: TransformersModel, texts: list[str]) -> set[tuple[int, ...]]:
    return {tuple(row) for row in tiny_models.batch_of(model, texts).sequences()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("where", ["1:f", "1:o", "1:v", "1:p", "2:k,v"])
def test_two_sentences_are_read_and_proven_from_one_matrix(load, family: str, where: str):
    model, texts = load(family), tiny_models.sentences((4, 6), 5)
    found = Decode()(seen(model, texts, where), stream(0, "attack"))
    assert set(found.sequences) == right(model, texts)
    assert found.certificates == ("proven", "proven")
    assert f"read from block {where[0]}'s" in found.notes[0]


def test_keys_alone_are_read_where_positions_turn_them_and_not_where_they_are_added(load):
    texts = tiny_models.sentences((5,), 5)
    found = Decode()(seen(load("llama"), texts, "1:k"), stream(0, "attack"))
    assert found.certificates == ("proven",)
    assert telling_span(seen(load("gpt2"), texts, "1:k")) is None  # only differences of its rows are there


def test_queries_alone_are_refused_since_the_first_word_sends_none(load):
    with pytest.raises(NotSupportedError, match="the first word sends no query"):
        Decode()(seen(load("llama"), tiny_models.sentences((5,), 5), "1:q"), stream(0, "attack"))


@pytest.mark.parametrize("role", ["q", "o", "f", "p"])
def test_a_classifier_s_last_block_holds_prefixes_in_its_keys_and_values_alone(load, role: str):
    model, texts = load("llama"), tiny_models.sentences((4, 5, 6), 5)
    assert telling_span(seen(model, texts, f"2:{role}")) is None
    assert telling_span(seen(model, texts, "2:v")) is not None


def test_next_words_losses_leave_the_last_word_out(load):
    model, texts = load("llama", "causal-lm"), tiny_models.sentences((5, 4), 5)
    found = Decode()(seen(model, texts, "2:f"), stream(0, "attack"))
    assert set(found.sequences) == {row[:-1] for row in right(model, texts)}
    assert set(found.certificates or ()) == {"likely"}


def test_block_0_s_attention_reads_one_sentence_by_its_positions_and_no_batch(load):
    model = load("gpt2")
    one, two = tiny_models.sentences((5,), 5), tiny_models.sentences((4, 5), 5)
    assert telling_span(seen(model, one, "0:q,v")) is not None
    assert telling_span(seen(model, two, "0:q,v")) is None
    found = Decode()(seen(model, one, "0:q,v"), stream(0, "attack"))
    assert set(found.sequences) == right(model, one)
    assert telling_span(seen(load("llama"), one, "0:q,v")) is None  # its rows know of no order


@pytest.mark.parametrize(
    ("family", "where", "missing"), [("llama", "0:v", 0), ("llama", "0:q", 1), ("gpt2", "0:k,v", 0)]
)
def test_block_0_s_attention_names_a_batch_s_words(load, family: str, where: str, missing: int):
    model = load(family)
    sent, other = (tiny_models.sentences((4, 5), 5, words) for words in (tiny_models.MADE_UP, tiny_models.OTHERS))
    found = Decode()(seen(model, sent, where), stream(0, "attack"))
    words = {word.token for word in found.words}
    true = right(model, sent)
    # every sentence's first word sends no query
    assert words == {token for row in true for token in row[missing:]}
    assert not words & {token for row in right(model, other) for token in row}
    assert found.sequences == ()
    assert "they tell a decoder's words, and no sentence" in found.notes[0]


def test_block_0_s_feed_forward_reads_prefixes_unless_it_stands_beside_the_attention(load):
    texts = tiny_models.sentences((4, 5), 5)
    assert telling_span(seen(load("llama"), texts, "0:f")) is not None
    assert telling_span(seen(load("phi"), texts, "0:f,p")) is None


def test_dropout_and_encoders_are_not_for_it(load):
    texts = tiny_models.sentences((5,), 5)
    dropped = seen(load("gpt2"), texts, "1:v")
    known = replace(dropped, knowledge=replace(dropped.knowledge, dropout=0.1))
    assert read_prefixes(known, 64, stream(0, "attack")) is None
    assert read_prefixes(seen(load("bert"), texts, "1:v"), 64, stream(0, "attack")) is None


def test_another_batch_s_sentences_are_not_found(load):
    """The swap control: what was not sent does not grow."""
    model = load("llama")
    sent, other = (tiny_models.sentences((4, 5), 5, words) for words in (tiny_models.MADE_UP, tiny_models.OTHERS))
    found = Decode()(seen(model, sent, "1:f"), stream(0, "attack"))
    assert not set(found.sequences) & right(model, other)


def test_words_that_the_model_foretells_last_are_found_too(load, monkeypatch):
    model, texts = load("llama"), tiny_models.sentences((5, 4), 5)
    ids = tiny_models.batch_of(model, texts).ids
    monkeypatch.setattr(growing_file, "_FIRST", 8)
    monkeypatch.setattr(growing_file, "usual_places", lambda m: torch.arange(m.vocabulary_size).flip(0).tolist())
    worst = torch.arange(float(model.vocabulary_size)).index_fill(0, ids.unique(), -1e9)
    monkeypatch.setattr(TransformersModel, "foretold", lambda self, prefixes: worst.expand(len(prefixes), -1))
    found = Decode()(seen(model, texts, "1:p"), stream(0, "attack"))
    assert set(found.sequences) == right(model, texts)


def test_sentences_that_begin_alike_or_with_one_word_twice_are_told_apart(load):
    model = load("llama")
    words = tiny_models.sentences((6,), 5)[0].split()
    texts = [" ".join(words[:4]), " ".join([*words[:2], words[5], words[4]]), f"{words[3]} {words[3]} {words[4]}"]
    found = Decode()(seen(model, texts, "1:v"), stream(0, "attack"))
    assert set(found.sequences) == right(model, texts)
    assert found.certificates == ("proven",) * 3


def test_texts_of_two_words_that_attention_cannot_tell_apart_are_not_proven(load):
    """What enters block 0's output matrix mixes two values alone: other texts of the two words fit as well."""
    model, texts = load("qwen2"), tiny_models.sentences((4, 6), 5)
    assert {len(set(row)) for row in right(model, texts)} == {2}
    found = Decode()(seen(model, texts, "0:o"), stream(0, "attack"))
    assert not set(found.sequences) & right(model, texts)
    assert "proven" not in (found.certificates or ())


def test_a_sentence_that_begins_another_adds_no_row_and_nothing_is_proven(load):
    model = load("llama")
    words = tiny_models.sentences((5,), 5)[0].split()
    found = Decode()(seen(model, [" ".join(words), " ".join(words[:3])], "1:v"), stream(0, "attack"))
    assert set(found.sequences) == right(model, [" ".join(words)])
    assert found.certificates == ("likely",)
    assert "the others of the batch are copies of these, or begin one of them" in found.notes


def test_a_step_of_sgd_is_read_and_proven_from_one_matrix_and_one_of_adamw_refused(load):
    model, texts = load("llama"), tiny_models.sentences((4, 5), 5)
    batch = tiny_models.batch_of(model, texts)
    step = tiny_models.seen_of(Client(model, LocalTraining("sgd", 0.05)), batch, "1:v")
    found = Decode()(step, stream(0, "attack"))
    assert set(found.sequences) == right(model, texts)
    assert found.certificates == ("proven", "proven")
    step = tiny_models.seen_of(Client(model, LocalTraining("adamw", 1e-3)), batch, "1:v")
    with pytest.raises(NotSupportedError, match="of a decoder: of SGD"):
        Decode()(step, stream(0, "attack"))


def test_what_the_tokenizer_puts_around_a_sentence_is_part_of_it(tmp_path: Path):
    folder = tiny_models.make_folder("llama", tmp_path / "llama")
    told = json.loads((folder / "tokenizer.json").read_text())
    frame = [{"SpecialToken": {"id": "[UNK]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    told["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*frame, frame[0]],
        "pair": [*frame, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[UNK]": {"id": "[UNK]", "ids": [1], "tokens": ["[UNK]"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(told))
    model, texts = tiny_models.tiny(folder), tiny_models.sentences((4, 5), 5)
    assert model.special.prefix == model.special.suffix == (1,)
    for where in ("1:v", "1:q"):  # the first token is known, so that queries alone are enough
        found = Decode()(seen(model, texts, where), stream(0, "attack"))
        assert set(found.sequences) == right(model, texts)
        assert found.certificates == ("proven", "proven")


def test_more_prefixes_than_can_be_told_apart_end_the_search(load, monkeypatch):
    model, texts = load("llama"), tiny_models.sentences((4, 6), 5)
    monkeypatch.setattr(growing_file, "_MOST", 1)
    found = Decode()(seen(model, texts, "1:v"), stream(0, "attack"))
    assert found.sequences == ()
    assert "more prefixes fit than can be told apart" in found.notes


def test_the_search_ends_once_every_row_is_found(load, monkeypatch):
    """Of one sentence no word is tried behind the last one."""
    model, texts = load("llama"), tiny_models.sentences((5,), 5)
    inside = telling_span(seen(model, texts, "1:f"))
    assert inside is not None
    search, tried = PrefixSearch(model, inside, 1, 64), []
    act = search._try
    monkeypatch.setattr(search, "_try", lambda some, part: (tried.append(len(some[0])), act(some, part)))
    search.run()
    assert search.missing == 0
    assert max(tried) == 4


def test_both_matrices_of_a_gated_feed_forward_are_explained(load):
    model, texts = load("llama"), tiny_models.sentences((5, 4), 5)
    sent = matrices_of(seen(model, texts, "1:f"), [(1, "f")])
    assert sent[1, "f"].shape == (2 * 48, tiny_models.WIDTH)
    told = explain(model, tiny_models.batch_of(model, texts).sequences(), sent, 0.5)
    assert told.left < 1e-5
    half = seen(model, texts, "1:f")
    half = replace(half, tensors={n: t for n, t in half.tensors.items() if "gate" not in n})
    assert matrices_of(half, [(1, "f")]) == {}


def test_foretold_scores_are_those_of_a_language_model_that_writes_by_its_word_table(folders, load):
    model = load("gpt2")
    tied = AutoModelForCausalLM.from_config(model.module.config).eval()
    tied.transformer.load_state_dict(model.module.transformer.state_dict())
    tied.tie_weights()
    ids = tiny_models.batch_of(model, tiny_models.sentences((5, 5), 5)).ids
    with torch.no_grad():
        expected = tied(ids).logits[:, -1]
    assert torch.allclose(model.foretold(ids), expected, atol=1e-5)
