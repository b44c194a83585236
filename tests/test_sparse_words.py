"""Words from fewer directions than tokens: what adapters give away, what is certain, and where it ends."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.errors import NotSupportedError
from gradaudit.judge.words import score_words
from gradaudit.leakage.adapters import sparse_words as sparse
from gradaudit.leakage.adapters.chance import could_hide
from gradaudit.leakage.adapters.noisy_words import heard
from gradaudit.leakage.adapters.sparse_words import _Pursuit, exact, sparse_words
from gradaudit.leakage.uneven.entries import Entries, entries
from gradaudit.leakage.uneven.steps import AdamStep, PlainStep
from gradaudit.leakage.uneven.weighted import Weighted
from gradaudit.models.model import FirstInputs
from gradaudit.models.spec import Lora, ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining, NamedWord
from tiny_models import WORDS, batch_of, seen_of, sentences


def adapted(name: str, rank: int, trained: bool = True, task: str = "classification"):
    """A model with adapters, as after some steps: B is not zero."""
    model = load_model(ModelSpec(name, task, lora=Lora(rank)))
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter, value in model.parameters().items():
            if trained and "lora_B" in parameter:
                value.copy_(0.1 * torch.randn(value.shape, generator=rng))
    return model


@pytest.fixture(scope="module")
def llama(folders):
    return adapted(f"random:{folders['llama']}", 2)


def held(model, batch) -> set[int]:
    return {token for ids in batch.sequences() for token in ids} - model.special.ids


def test_six_directions_name_twelve_words_for_certain(llama):
    batch = batch_of(llama, sentences([5, 4, 3], 1))
    found = Decode()(seen_of(Client(llama), batch), stream(0, "attack"))
    assert found.details["directions"] == 6
    assert {word.token for word in found.words or ()} == held(llama, batch)
    assert all(word.certain for word in found.words or ())


def test_one_step_of_sgd_names_them_too_and_the_rounding_of_weights_is_reckoned_with(llama):
    batch = batch_of(llama, sentences([5, 4], 2))
    found = Decode()(seen_of(Client(llama, LocalTraining("sgd", 0.1)), batch), stream(0, "attack"))
    assert {word.token for word in found.words or ()} == held(llama, batch)


def test_sentences_come_where_adapters_have_a_direction_for_each_token(folders):
    model = adapted(f"random:{folders['llama']}", 8)
    batch = batch_of(model, sentences([4, 3], 3))
    found = Decode()(seen_of(Client(model), batch), stream(0, "attack"))
    assert sorted(found.sequences) == sorted(tuple(ids) for ids in batch.sequences())
    assert set(found.certificates or ()) == {"proven"}
    assert {word.token for word in found.words or ()} == held(model, batch)


def test_block_0_alone_gives_the_words_of_a_few_tokens_too(llama):
    batch = batch_of(llama, sentences([3], 1))
    found = Decode()(seen_of(Client(llama), batch, "0:q,k,v"), stream(0, "attack"))
    assert {word.token for word in found.words or ()} == held(llama, batch)
    assert found.sequences == ()


def test_as_many_words_as_the_width_are_not_told(llama):
    batch = batch_of(llama, sentences([12, 12, 12], 1))
    found = Decode()(seen_of(Client(llama), batch), stream(0, "attack"))
    assert len(held(llama, batch)) > llama.width
    assert not any(word.certain for word in found.words or ())
    assert any("no " in note and "words explain" in note for note in found.notes)


@pytest.mark.parametrize("words", [6, 12])
def test_directions_that_hold_something_else_make_no_word_certain(llama, words):
    """Oracle: combinations of known rows. With a stranger's row among them nothing explains them."""
    rng = torch.Generator().manual_seed(words)
    rows = llama.first_inputs(0)[20 : 20 + words].double()
    directions = torch.randn(6, words, generator=rng, dtype=torch.double) @ rows
    right = sparse_words(llama, exact({"q": directions}), 0.01)
    assert {word.token for word in right.words} == set(range(20, 20 + words))
    assert all(word.certain for word in right.words)
    stranger = torch.randn(6, 1, generator=rng, dtype=torch.double) @ torch.randn(
        1, llama.width, generator=rng, dtype=torch.double
    )
    wrong = sparse_words(llama, exact({"q": directions + stranger}), 0.01)
    assert not wrong.explained
    assert not any(word.certain for word in wrong.words)


def test_a_word_that_another_could_stand_for_is_not_certain(llama, monkeypatch):
    """Two tokens with one row: which of them it was nobody can tell."""
    parts = llama.first_input_parts()
    twin = parts.words.clone()
    twin[70] = twin[21]
    monkeypatch.setattr(llama, "first_input_parts", lambda: replace(parts, words=twin))
    rng = torch.Generator().manual_seed(0)
    directions = torch.randn(6, 5, generator=rng, dtype=torch.double) @ llama.first_inputs(0)[20:25].double()
    found = sparse_words(llama, exact({"q": directions}), 0.01)
    assert found.explained
    sure = {word.token for word in found.words if word.certain}
    assert sure == {20, 22, 23, 24}


def test_adapters_of_no_step_and_of_another_optimizer_say_so(folders, llama):
    batch = batch_of(llama, sentences([4], 1))
    fresh = adapted(f"random:{folders['llama']}", 2, trained=False)
    found = Decode()(seen_of(Client(fresh), batch), stream(0, "attack"))
    assert not found.words
    assert "B is still zero" in found.notes[0]
    with pytest.raises(NotSupportedError, match="another optimizer"):
        Decode()(seen_of(Client(llama, LocalTraining("sgd", 0.1, 2, momentum=0.9)), batch), stream(0, "attack"))
    with pytest.raises(NotSupportedError, match="q, k or v of block 0"):
        Decode()(seen_of(Client(llama), batch, "1:q,k,v"), stream(0, "attack"))


@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("adamw", 2e-4, weight_decay=0.01)])
def test_an_encoder_s_words_are_told_apart_from_its_positions_and_behind_adamw(training):
    model = adapted("minilm", 4)
    texts = [" ".join(WORDS[at : at + 9]) for at in (20, 29, 38, 47)]
    batch = batch_of(model, texts)
    found = Decode()(seen_of(Client(model, training), batch), stream(0, "attack"))
    assert found.details["directions"] <= 12 < len(held(model, batch))
    assert {word.token for word in found.words or ()} == held(model, batch)
    assert all(word.certain for word in found.words or ())


@pytest.mark.parametrize(
    "training", [LocalTraining(), LocalTraining("adamw", 2e-4, eps=1e-3), LocalTraining("sgd", 0.1)]
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_under_autocast_words_are_rounded_as_they_enter_and_their_gradient_once_more(folders, precision, training):
    model = adapted(f"random:{folders['llama']}", 4)
    batch = batch_of(model, sentences([3, 2], 1))
    seen = seen_of(Client(model, replace(training, precision=precision)), batch)
    found = Decode()(seen, stream(0, "attack"))
    assert {word.token for word in found.words or () if word.certain} == held(model, batch)


def test_longer_sentences_are_looked_for_before_more_words(monkeypatch):
    tried = []

    class Pursuit:
        def __init__(self, model, fitting, places, masked):
            self.places = places

        def words(self, level, room):
            tried.append((self.places, room))
            return SimpleNamespace(explained=False)

    monkeypatch.setattr(sparse, "_Pursuit", Pursuit)
    seen = Entries(torch.randn(2, 9).double(), torch.zeros(2, 9).double(), PlainStep(), {"q": 2})
    sparse_words(SimpleNamespace(absolute_positions=True), seen, 0.01)
    assert tried == [(24, 0.4), (96, 0.4), (256, 0.4), (24, 0.9), (96, 0.9), (256, 0.9)]
    tried.clear()
    sparse_words(SimpleNamespace(absolute_positions=False), seen, 0.01)
    assert tried == [(0, 0.9)]


@pytest.mark.parametrize("noise", [1e-4, 1e-2, 0.1, 0.3, 1.0])
def test_under_noise_nothing_wrong_is_certain(llama, noise):
    """Swap control: near the noise another word may explain as well, and then nothing is certain."""
    rows = llama.first_inputs(0).double()
    for seed in range(6):
        rng = torch.Generator().manual_seed(seed)
        right = (20 + torch.randperm(60, generator=rng)[:8]).tolist()
        clean = torch.randn(6, 8, generator=rng, dtype=torch.double) @ rows[right]
        sigma = noise * float(clean.square().mean().sqrt())
        sent = clean + sigma * torch.randn(clean.shape, generator=rng, dtype=torch.double)
        seen = Entries(sent, torch.full_like(sent, sigma), PlainStep(), {"q": 6})
        found = sparse_words(llama, seen, 0.01)
        assert {word.token for word in found.words if word.certain} <= set(right)
        if noise < 1e-3:
            assert {word.token for word in found.words if word.certain} == set(right)


@pytest.mark.parametrize(("noise", "sure"), [(0.01, [12]), (0.3, range(1, 12)), (1.0, [0])])
def test_words_stand_out_of_noise_as_large_as_the_directions(llama, monkeypatch, noise, sure):
    """One draw; what the others could hide in the noise decides which words are certain."""
    rows = wide(monkeypatch, llama)
    rng = torch.Generator().manual_seed(5)
    clean = torch.randn(24, 12, generator=rng, dtype=torch.double) @ rows[20:32]
    sigma = noise * float(clean.square().mean().sqrt())
    sent = clean + sigma * torch.randn(clean.shape, generator=rng, dtype=torch.double)
    found = sparse_words(llama, Entries(sent, torch.full_like(sent, sigma), PlainStep(), {"q": 24}), 0.01)
    assert {word.token for word in found.words} == set(range(20, 32))
    assert sum(word.certain for word in found.words) in sure


def test_a_word_that_stands_for_another_gives_way_to_it(llama, monkeypatch):
    """What the right word explains beside the wrong one is below chance; in its place it explains more."""
    rows = wide(monkeypatch, llama)
    rows[40] = 0.95 * rows[20] + 0.3 * rows[40]
    rng = torch.Generator().manual_seed(6)
    sent = torch.randn(24, 1, generator=rng, dtype=torch.double) @ rows[20:21]
    sent += 5.0 * torch.randn(24, 600, generator=rng, dtype=torch.double)
    seen = Entries(sent, torch.full_like(sent, 5.0), PlainStep(), {"q": 24})
    assert heard(seen, rows, torch.zeros(600, 0, dtype=torch.double), [40], []).words == [20]
    assert heard(seen, rows, torch.zeros(600, 0, dtype=torch.double), [40], [20]).words == [40]


def test_a_word_that_explains_no_more_than_chance_is_put_back(llama, monkeypatch):
    """Word 20 was sent; the word to begin with was not, and neither was any that could be put in its place."""
    rows = wide(monkeypatch, llama)
    rng = torch.Generator().manual_seed(6)
    sent = torch.randn(24, 1, generator=rng, dtype=torch.double) @ rows[20:21]
    sent += 0.1 * torch.randn(24, 600, generator=rng, dtype=torch.double)
    seen = Entries(sent, torch.full_like(sent, 0.1), PlainStep(), {"q": 24})
    assert heard(seen, rows, torch.zeros(600, 0, dtype=torch.double), [50, 20], []).words == [20]


@pytest.mark.parametrize("noise", [(), (build("defense", "gaussian", {"sigma": 0.01, "relative": True}),)])
def test_few_directions_tell_no_noise(folders, noise):
    """All of them are the batch's: the smallest say nothing of noise, and untold noise is not reckoned with."""
    model = adapted(f"random:{folders['llama']}", 16)
    seen = seen_of(Client(model, defenses=noise), batch_of(model, sentences([3, 2], 1)), given=Given(defenses=False))
    assert entries(seen, 0) is None


def test_noise_told_of_a_whole_matrix_is_not_taken_for_that_of_its_parts(folders):
    """GPT-2 sends q, k and v as one: noise relative to its size is many times that of k's."""
    model = load_model(ModelSpec(f"random:{folders['gpt2']}"))
    batch = batch_of(model, sentences([3], 1))
    noise = (build("defense", "gaussian", {"sigma": 0.05, "relative": True}),)
    noisy, clean = (seen_of(Client(model, defenses=told), batch) for told in (noise, ()))
    read = entries(noisy, 0)
    assert read is not None
    off = torch.cat([noisy.role(0, role)[0] - clean.role(0, role)[0] for role in "qkv"]).double() / read.spread
    for part in read.parts(off).values():
        assert float(part.square().mean()) == pytest.approx(1.0, rel=0.4)


@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("sgd", 0.1)], ids=["gradient", "delta"])
def test_told_noise_is_the_error_of_what_was_sent(llama, training):
    """Oracle: the same batch without noise. What it differs by is of the size that is reckoned with."""
    batch = batch_of(llama, sentences([5, 4], 1))
    noise = (build("defense", "gaussian", {"sigma": 0.05, "relative": True}),)
    clean, noisy = (seen_of(Client(llama, training, defenses=told), batch) for told in ((), noise))
    sent, plain = (torch.cat([seen.role(0, role)[0] for role in "qkv"]).double() for seen in (noisy, clean))
    read = entries(noisy, 0)
    assert read is not None
    off = (sent - plain) / read.spread / (0.1 if training.optimizer == "sgd" else 1.0)
    assert float(off.square().mean()) == pytest.approx(1.0, rel=0.4)


@pytest.mark.parametrize(
    ("chi2", "told", "squares"), [(1.0, True, 0), (1.05, True, 50), (0.5, True, 500), (0.9, False, 900)]
)
def test_what_could_hide_is_all_that_told_noise_does_not_leave_by_itself(chi2, told, squares):
    """Closed form. So little left that noise was told too large counts whole, as errors that are only reckoned do."""
    assert could_hide(chi2, 1000, told) == pytest.approx(9 * (squares + 6 * 2000**0.5))


@pytest.mark.parametrize("told", [True, False])
def test_noise_of_a_client_s_adapters_is_reckoned_with_where_it_is_told(llama, told):
    batch = batch_of(llama, sentences([5, 4], 1))
    noise = (build("defense", "gaussian", {"sigma": 1e-3, "relative": True}),)
    seen = seen_of(Client(llama, defenses=noise), batch, given=Given(defenses=told))
    found = Decode()(seen, stream(0, "attack"))
    assert any(word.certain for word in found.words or ()) == told
    if told:
        assert {word.token for word in found.words or ()} == held(llama, batch)


def test_with_dropout_on_an_encoder_s_words_stand_out_and_none_is_certain():
    model = adapted("minilm", 8)
    batch = batch_of(model, [" ".join(WORDS[at : at + 9]) for at in (20, 29)])
    found = Decode()(seen_of(Client(model, dropout=True), batch), stream(0, "attack"))
    named = {word.token for word in found.words or ()}
    assert len(named & held(model, batch)) >= 0.9 * len(held(model, batch))
    assert len(named - held(model, batch)) <= 1
    assert not any(word.certain for word in found.words or ())
    assert "dropout was on" in found.notes[0]


def test_one_adapter_beside_a_fused_matrix_counts_once(folders):
    model = adapted(f"random:{folders['gpt2']}", 2)
    batch = batch_of(model, sentences([3], 1))
    seen = seen_of(Client(model, LocalTraining("sgd", 0.1)), batch)
    changes = entries(seen, 0)
    assert changes is not None
    assert len(changes.sent) == sum(changes.groups.values()) == 2


def test_a_batch_without_certain_words_counts_nothing_for_certain(llama):
    batch = batch_of(llama, sentences([3], 1))
    named = [NamedWord(token) for token in held(llama, batch)]
    assert score_words(llama, batch, named, None).certain == 0.0
    assert score_words(llama, batch, named, None).certain_right is None
    sure = [replace(named[0], certain=True), NamedWord(90, certain=True)]
    scored = score_words(llama, batch, sure, None)
    assert scored.certain == pytest.approx(100 / 3)
    assert scored.certain_right == 50.0


def wide(monkeypatch, model, words: int = 500, width: int = 600):
    """The model with a random dictionary of a real model's width; its rows."""
    rows = torch.randn(words, width, generator=torch.Generator().manual_seed(9))
    zero = torch.zeros(1, width)
    parts = FirstInputs(rows, zero, torch.ones(width), zero[0], 1e-6, False)
    monkeypatch.setattr(model, "first_input_parts", lambda: parts)
    return rows.double()


@pytest.mark.parametrize(("square", "all_certain"), [(0.0, True), (400.0, False)])
def test_a_word_left_out_that_explains_more_than_chance_makes_none_certain(llama, monkeypatch, square, all_certain):
    """A weak word: too little for a word of its own, and chi^2 hides it among fourteen thousand entries.

    Amid even noise it is heard, and is not certain: as much could hide in the noise of others.
    """
    rows = wide(monkeypatch, llama)
    rng = torch.Generator().manual_seed(3)
    left = torch.randn(24, 9, generator=rng, dtype=torch.double)
    left[:, 8] *= (square / (left[:, 8] @ left[:, 8] * (rows[28] @ rows[28]))) ** 0.5 * 1e-3
    sent = left @ rows[20:29] + 1e-3 * torch.randn(24, rows.shape[1], generator=rng, dtype=torch.double)
    spread = torch.full_like(sent, 1e-3)
    heard = sparse_words(llama, Entries(sent, spread, PlainStep(), {"q": 24}), 0.01)
    assert {word.token: word.certain for word in heard.words} == dict.fromkeys(range(20, 28), True) | (
        {28: False} if square else {}
    )
    spread[0, 0] *= 1.001  # no longer noise of one size
    found = sparse_words(llama, Entries(sent, spread, PlainStep(), {"q": 24}), 0.01)
    assert found.explained
    assert {word.token for word in found.words} == set(range(20, 28))
    assert {word.certain for word in found.words} == {all_certain}


def test_a_weak_word_is_heard_in_the_entries_that_are_known_best(llama, monkeypatch):
    """Nine entries in ten drown it, and the pursuit, which weighs all alike, cannot tell it from others."""
    rows = wide(monkeypatch, llama)
    rng = torch.Generator().manual_seed(4)
    left = torch.randn(24, 9, generator=rng, dtype=torch.double)
    left[:, 8] *= 3e-3
    shape = (24, rows.shape[1])
    spread = torch.where(torch.rand(shape, generator=rng) < 0.1, 1e-3, 0.2).double()
    sent = left @ rows[20:29] + spread * torch.randn(shape, generator=rng, dtype=torch.double)
    found = sparse_words(llama, Entries(sent, spread, PlainStep(), {"q": 24}), 0.01)
    assert found.explained
    assert {word.token for word in found.words} == set(range(20, 29))


@pytest.mark.parametrize("seed", [0, 5, 10])
def test_all_directions_count_alike_however_strong_a_word_is(llama, seed):
    """Half the width of words: taken by strength instead, none of these three draws is explained."""
    rng = torch.Generator().manual_seed(seed)
    right = (20 + torch.randperm(70, generator=rng)[:18]).tolist()
    directions = torch.randn(6, 18, generator=rng, dtype=torch.double) @ llama.first_inputs(0)[right].double()
    assert {word.token for word in sparse_words(llama, exact({"q": directions}), 0.01).words} == set(right)


def test_sets_by_chance_are_counted_and_where_there_may_be_one_no_word_is_certain(llama, monkeypatch):
    """Closed form: C(V, n) sets, each of which explains directions with the product of (error / size)^(d - n)."""
    rng = torch.Generator().manual_seed(0)
    directions = torch.randn(6, 5, generator=rng, dtype=torch.double) @ llama.first_inputs(0)[20:25].double()
    pursuit = _Pursuit(llama, Weighted(exact({"q": directions})), 0)
    pursuit.sizes, pursuit.free = torch.tensor([3.0, 3.0, 3.0, 3.0, 3.0]).log(), 31
    sets = math.log(math.comb(len(pursuit.rows), 5))
    assert pursuit._by_chance(5) == pytest.approx(sets - 5 * 26 * math.log(3.0))
    found = sparse_words(llama, exact({"q": directions}), 0.01)
    assert all(word.certain for word in found.words)
    monkeypatch.setattr(_Pursuit, "_by_chance", lambda self, words: 0.0)
    found = sparse_words(llama, exact({"q": directions}), 0.01)
    assert found.explained
    assert not any(word.certain for word in found.words)


def test_behind_adamw_entries_that_are_hardly_known_take_the_words_own_values(llama, monkeypatch):
    """Words of very different strength: left at their bounds, those entries hide all but the strongest twelve."""
    rows = wide(monkeypatch, llama, width=300)
    rng = torch.Generator().manual_seed(1)
    left = torch.randn(12, 20, generator=rng, dtype=torch.double)
    gradient = left * torch.exp(1.5 * torch.randn(1, 20, generator=rng, dtype=torch.double)) @ rows[20:40]
    step = AdamStep(float(gradient.abs().median()) / 10)
    sent = step.sent(gradient) + 3e-3 * torch.randn(gradient.shape, generator=rng, dtype=torch.double)
    found = sparse_words(llama, Entries(sent.clamp(-1, 1), torch.full_like(sent, 3e-3), step, {"q": 12}), 0.01)
    assert found.explained
    assert {word.token for word in found.words} == set(range(20, 40))
