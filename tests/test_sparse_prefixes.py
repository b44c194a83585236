"""Sentences from fewer directions than tokens: exact, proven, and nothing where something else is in the update."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.leakage.adapters import sparse_prefixes
from gradaudit.leakage.adapters.chance import beyond_chance
from gradaudit.leakage.adapters.sparse_prefixes import PrefixPursuit, Unheard, _blocks, put_together, sparse_sentences
from gradaudit.leakage.uneven.followed import LAST_MISSING
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining, NamedWord
from test_sparse_words import adapted
from tiny_models import batch_of, seen_of, sentences


@pytest.fixture(scope="module")
def deep(folders, tmp_path_factory) -> str:
    """Eight blocks: three have too few directions."""
    where = tmp_path_factory.mktemp("deep") / "llama"
    shutil.copytree(folders["llama"], where)
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 8}))
    return f"random:{where}"


@pytest.fixture(scope="module")
def llama(deep):
    return adapted(deep, 2)


def read(model, batch, **given):
    return Decode()(seen_of(Client(model), batch, given=Given(**given)), stream(0, "attack"))


def told(batch) -> dict[tuple[int, ...], int]:
    return dict(zip(map(tuple, batch.sequences()), batch.labels.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [(8,), (5, 4), (5, 4, 3)], ids=str)
def test_six_directions_give_the_sentences_of_up_to_twelve_tokens(llama, sizes, seed):
    batch = batch_of(llama, sentences(sizes, seed))
    found = read(llama, batch)
    assert dict(zip(found.sequences, found.labels or (), strict=True)) == told(batch)
    assert found.certificates == ("proven",) * len(sizes)


@pytest.mark.parametrize("rank", [1, 8])
def test_the_rank_is_no_limit(deep, rank):
    model = adapted(deep, rank)
    batch = batch_of(model, sentences([4, 3], 3))
    found = read(model, batch)
    assert dict(zip(found.sequences, found.labels or (), strict=True)) == told(batch)
    assert found.certificates == ("proven",) * 2


@pytest.mark.parametrize(
    "how",
    [LocalTraining("sgd", 0.1), LocalTraining("adamw", 1e-3, weight_decay=0.1, eps=1e-2)],
    ids=lambda how: how.optimizer,
)
def test_one_step_gives_them_too_each_entry_in_its_own_error(deep, how):
    model = adapted(deep, 4)
    batch = batch_of(model, sentences([5, 4], 1))
    found = Decode()(seen_of(Client(model, how), batch), stream(0, "attack"))
    assert set(found.sequences) == set(told(batch))
    assert found.certificates == ("proven",) * 2


def test_the_batch_size_need_not_be_known(llama):
    batch = batch_of(llama, sentences([5, 4], 1))
    found = read(llama, batch, batch_size=False)
    assert set(found.sequences) == set(told(batch))
    assert found.certificates == ("proven",) * 2


@pytest.mark.parametrize("how", [LocalTraining("none"), LocalTraining("sgd", 0.1)], ids=lambda how: how.optimizer)
def test_of_next_word_prediction_the_last_word_is_missing_and_nothing_is_proven(deep, how):
    model = adapted(deep, 2, task="causal-lm")
    batch = batch_of(model, sentences([5, 4], 1))
    found = Decode()(seen_of(Client(model, how), batch), stream(0, "attack"))
    assert set(found.sequences) == {tuple(ids[:-1]) for ids in batch.sequences()}
    assert found.certificates == ("likely",) * 2
    assert LAST_MISSING in found.notes


def test_more_sentences_than_the_batch_has_are_not_proven(llama):
    batch = batch_of(llama, sentences([5, 4], 1))
    seen = seen_of(Client(llama), batch)
    seen = replace(seen, knowledge=replace(seen.knowledge, batch_size=1))
    found = Decode()(seen, stream(0, "attack"))
    assert set(found.certificates or ()) == {"likely"}


def test_words_that_occur_often_are_put_where_they_stand(llama):
    one, other = sentences([5, 4], 4)
    first, second, *_ = one.split()
    batch = batch_of(llama, [f"{first} {second} {first} {second} {first}", other])
    found = read(llama, batch)
    assert set(found.sequences) == set(told(batch))
    assert found.certificates == ("proven",) * 2


def test_a_copy_and_what_another_one_begins_with_are_missed_and_said_to_be(llama):
    (text,) = sentences([6], 2)
    batch = batch_of(llama, [text, text, " ".join(text.split()[:3])], [1, 1, 0])
    found = read(llama, batch)
    assert found.sequences == (max(told(batch), key=len),)
    assert found.certificates == ("proven",)
    assert any("fewer sentences than the batch has" in note for note in found.notes)


def test_a_block_of_another_batch_gives_no_sentence(llama):
    """Swap control: the words are right, and no sentences explain what was sent of block 2."""
    batch, other = (batch_of(llama, sentences((5, 4), seed)) for seed in (1, 2))
    seen, foreign = (seen_of(Client(llama), one) for one in (batch, other))
    names = {view.name for role in "qkv" for view in llama.views(2, role)}
    mixed = {name: (foreign if name in names else seen).tensors[name] for name in seen.tensors}
    found = Decode()(replace(seen, tensors=mixed), stream(0, "attack"))
    assert found.sequences == ()
    assert found.words
    assert any("no sentence's rows explain" in note for note in found.notes)
    found = Decode()(seen_of(Client(llama), batch, "0:q,k,v"), stream(0, "attack"))
    assert found.words
    assert not any("no sentence's rows explain" in note for note in found.notes)


def test_noise_beyond_rounding_gives_no_sentence(llama):
    batch = batch_of(llama, sentences((5, 4), 1))
    seen = seen_of(Client(llama), batch)
    rng = torch.Generator().manual_seed(0)
    loud = {n: t + 1e-3 * t.std() * torch.randn(t.shape, generator=rng) for n, t in seen.tensors.items()}
    words = [token for ids in batch.sequences() for token in ids]
    assert set(sparse_sentences(seen, words, stream(0, "orders"))) == set(told(batch))
    assert sparse_sentences(replace(seen, tensors=loud), words, stream(0, "orders")) == {}


@pytest.mark.parametrize("seed", range(8))
def test_what_is_called_certain_was_in_the_batch(deep, seed):
    """Up to more words than the few dimensions hold, three directions a block."""
    model = adapted(deep, 1)
    batch = batch_of(model, sentences((5, 4, 3, 3)[: 2 + seed % 3], seed, distinct=seed % 2 == 0))
    words = sorted({token for ids in batch.sequences() for token in ids})
    found = sparse_sentences(seen_of(Client(model), batch), words, stream(seed, "orders"))
    assert {text for text, sure in found.items() if sure} <= set(told(batch))


@pytest.mark.parametrize("seed", range(6))
def test_entries_that_are_hardly_known_prove_nothing_wrong(llama, seed):
    """With an eps below the gradients most entries are bounds, which too few rows explain as well."""
    batch = batch_of(llama, sentences([4, 3], seed))
    how = LocalTraining("adamw", 1e-3, weight_decay=0.1, eps=10.0 ** -(3 + seed % 3))
    found = Decode()(seen_of(Client(llama, how), batch), stream(0, "attack"))
    sure = {text for text, one in zip(found.sequences, found.certificates or (), strict=True) if one == "proven"}
    assert sure <= set(told(batch))


@pytest.mark.parametrize("seed", range(3))
def test_where_others_are_still_heard_nothing_is_certain(llama, seed, monkeypatch):
    """As where chi^2 is blind: whatever is taken first passes for everything."""
    monkeypatch.setattr(sparse_prefixes, "EXPLAINED", 1e30)
    batch = batch_of(llama, sentences([5, 4], seed))
    words = [token for ids in batch.sequences() for token in ids]
    found = sparse_sentences(seen_of(Client(llama), batch), words, stream(0, "orders"))
    assert found
    assert not any(found.values())


def test_a_word_that_stands_in_no_sentence_leaves_them_unproven(llama):
    batch = batch_of(llama, sentences([5, 4], 1))
    tokens = sorted({token for ids in batch.sequences() for token in ids})
    stray = next(t for t in range(llama.vocabulary_size) if t not in {*tokens, *llama.special.ids})
    for words, said in ((tokens, "proven"), ([*tokens, stray], "likely")):
        found = put_together(seen_of(Client(llama), batch), [NamedWord(t, certain=True) for t in words], stream(0, "o"))
        assert set(found.sequences) == set(told(batch))
        assert found.certificates == (said,) * 2


def test_prefixes_taken_wrongly_are_dropped(llama):
    batch = batch_of(llama, sentences([5, 4], 1))
    seen = seen_of(Client(llama), batch)
    tokens = torch.tensor(sorted({token for ids in batch.sequences() for token in ids}))
    pursuit = PrefixPursuit(llama, _blocks(seen, 100), tokens, 0, stream(0, "orders"))
    right = [ids[: n + 1] for ids in told(batch) for n in range(len(ids))]
    pursuit._follow([prefix[:-1] for prefix in right if len(prefix) > 1])
    first, second = told(batch)
    wrong = [(*first[:2], second[1]), (second[2],)]
    for prefix in [*right, *wrong]:
        for block in pursuit.blocks.values():
            block.take(pursuit.candidates.index(prefix))
    assert pursuit._held() == dict.fromkeys(told(batch), True)


def test_a_word_that_is_not_certain_leaves_its_sentence_unproven(llama):
    batch = batch_of(llama, sentences([5, 4], 1))
    first, second = map(tuple, batch.sequences())
    words = [NamedWord(token, certain=token != first[2]) for token in (*first, *second)]
    found = put_together(seen_of(Client(llama), batch), words, stream(0, "o"))
    assert dict(zip(found.sequences, found.certificates or (), strict=True)) == {first: "likely", second: "proven"}


@pytest.mark.parametrize("seed", range(1, 5))
def test_what_is_left_is_heard(llama, seed):
    """Without one row of the batch that row explains most of what is left; with all, nothing explains anything."""
    batch = batch_of(llama, sentences([5, 4], seed))
    seen = seen_of(Client(llama, LocalTraining("sgd", 0.1)), batch)
    tokens = torch.tensor(sorted({token for ids in batch.sequences() for token in ids}))
    blocks = _blocks(seen, 100)
    pursuit = PrefixPursuit(llama, blocks, tokens, 0, stream(0, "orders"))
    every = [ids[: n + 1] for ids in told(batch) for n in range(len(ids))]
    for prefix in every:
        pursuit._follow([prefix])
    *most, last = [pursuit.candidates.index(prefix) for prefix in every]
    others = torch.tensor([at for at in range(len(pursuit.candidates)) if at not in most])
    chance = beyond_chance(sum(len(block.lines) for block in blocks.values()))

    def heard() -> torch.Tensor:
        return torch.stack([block.unheard().exactly(others) for block in blocks.values()]).sum(0)

    for at in most:
        for block in blocks.values():
            block.take(at)
    without = heard()
    assert int(others[without.argmax()]) == last
    assert float(without.max()) > 10 * chance
    for block in blocks.values():
        block.take(last)
    assert float(heard().max()) < chance


def test_what_a_candidate_explains_is_what_a_fit_with_it_gains():
    """Against least squares of each line, its entries weighed; and roughly where all weigh alike."""
    draw = torch.Generator().manual_seed(0)
    rows, candidates = (torch.randn(n, 12, dtype=torch.double, generator=draw) for n in (4, 5))
    weights = torch.rand(3, 12, dtype=torch.double, generator=draw) * 100 + 1
    target = torch.randn(3, 12, dtype=torch.double, generator=draw)

    def missed(some: torch.Tensor, weights: torch.Tensor) -> tuple[float, torch.Tensor]:
        left = torch.stack(
            [
                torch.linalg.lstsq((some * w.sqrt()).T, (t * w.sqrt())[:, None]).solution[:, 0]
                for t, w in zip(target, weights, strict=True)
            ]
        )
        off = target - left @ some
        return float((weights * off.square()).sum()), weights * off

    for given in (weights, torch.full_like(weights, 7.0)):
        before, off = missed(rows, given)
        gained = torch.tensor([before - missed(torch.cat([rows, one[None]]), given)[0] for one in candidates])
        left = Unheard(rows, candidates, given, off)
        torch.testing.assert_close(left.exactly(torch.arange(5)), gained.double())
    torch.testing.assert_close(left.about(), gained.double())


def test_a_word_that_another_one_could_stand_for_is_not_certain(deep):
    """Two tokens with one embedding have one row behind every prefix."""
    model = adapted(deep, 2)
    batch = batch_of(model, sentences([5, 4], 1))
    first, second = map(tuple, batch.sequences())
    other = next(t for t in range(model.vocabulary_size) if t not in {*first, *second, *model.special.ids})
    with torch.no_grad():
        embedding = model.parameters()[model.group("word")[0]]
        embedding[other] = embedding[first[2]]
    model.weights_changed()
    found = sparse_sentences(seen_of(Client(model), batch), [*first, *second, other], stream(0, "orders"))
    assert [sure for text, sure in sorted(found.items()) if text != second] == [False]
    assert found[second]
