"""Defenses that act before there is an update: on the text, and on what is trained."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.defenses.aegis import Aegis
from gradaudit.defenses.base import BatchDefense, RoleDefense
from gradaudit.defenses.dpsgd import DPSGD
from gradaudit.defenses.noise import Gaussian
from gradaudit.defenses.obfuscation import TokenObfuscation
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.leakage import guess_back
from gradaudit.models.neighbors import _related, stand_ins, stood_for
from gradaudit.registry import build, known
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining, Reconstruction
from tiny_models import FAMILIES, batch_of, seen_of, sentences


def test_every_defense_acts_where_the_contract_tests_look():
    acts = {d.acts_on for d in known("defense").values()}
    assert acts == {"batch", "example gradients", "model", "model and update", "update"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stand_ins_keep_shape_labels_and_special_tokens(load, family):
    model = load(family)
    batch = batch_of(model, sentences((4, 6), 1), [0, 1])
    before = batch.ids.clone()
    out = TokenObfuscation(alike=1.0).on_batch(model, batch, stream(0, "x"))
    assert torch.equal(batch.ids, before), "wrote into its input"
    assert torch.equal(out.mask, batch.mask)
    assert torch.equal(out.labels, batch.labels)
    special = torch.isin(batch.ids, torch.tensor(sorted(model.special.ids))) | ~batch.mask
    assert torch.equal(out.ids[special], batch.ids[special])
    changed = (out.ids != batch.ids)[~special]
    assert bool(changed.any())
    for one, other in zip(batch.ids[~special][changed].tolist(), out.ids[~special][changed].tolist(), strict=True):
        assert not _related(model.pieces([one]), model.pieces([other]))
    again = TokenObfuscation(alike=1.0).on_batch(model, batch, stream(0, "x"))
    assert torch.equal(again.ids, out.ids)


def test_the_stand_in_is_the_one_that_changes_the_output_least(load):
    """The oracle tries every stand-in of a sentence's only word."""
    model = load("bert", seed=2)
    batch = batch_of(model, sentences((1,), 3))
    how = TokenObfuscation(candidates=5, alike=1.0)
    out = how.on_batch(model, batch, stream(0, "x"))
    slot = len(model.special.prefix)
    word = int(batch.ids[0, slot])
    choices = stand_ins(model, word, how.candidates, how.alike)
    assert len(choices) == 5
    plain, away = model.logits(ids=batch.ids, mask=batch.mask), {}
    for word in choices:
        ids = batch.ids.clone()
        ids[0, slot] = word
        away[word] = float((model.logits(ids=ids, mask=batch.mask) - plain).detach().square().sum())
    assert int(out.ids[0, slot]) == min(away, key=away.get)  # type: ignore[arg-type]


def test_a_stand_in_is_no_synonym_and_no_form_of_the_word(load):
    model = load("bert")
    table = torch.nn.functional.normalize(model.word_vectors(), dim=1)
    like = table @ table[40]
    limit = float(like.sort(descending=True).values[6])
    found = stand_ins(model, 40, candidates=300, alike=limit)
    assert 8 < len(found) < 300, "there are no more, and none beyond the limit is taken instead"
    assert all(float(like[word]) <= limit + 1e-6 for word in found)
    assert _related(["walks"], ["##walk"])
    assert _related(["Ġwalked"], ["walker"])
    assert not _related(["dog"], ["walked"])


@pytest.mark.parametrize("task", ["classification", "causal-lm"])
def test_stand_ins_do_not_depend_on_the_rest_of_the_batch(load, task):
    model = load("gpt2", task)
    short, long = sentences((3, 9), 5)
    how = TokenObfuscation(alike=1.0)
    alone, both = (how.on_batch(model, batch_of(model, texts), stream(0, "x")) for texts in ([short], [short, long]))
    assert both.sequences()[0] == alone.sequences()[0]


def test_a_share_of_the_words_is_replaced(load):
    model = load("bert")
    batch = batch_of(model, [sentence for seed in range(6) for sentence in sentences((8,), seed)])
    whole = (TokenObfuscation(alike=1.0).on_batch(model, batch, stream(0, "x")).ids != batch.ids).sum()
    half = (TokenObfuscation(alike=1.0, share=0.5).on_batch(model, batch, stream(0, "x")).ids != batch.ids).sum()
    assert 0.3 * float(whole) < float(half) < 0.7 * float(whole)


def test_an_exact_attack_reads_the_stand_ins(load):
    """What is sent is the stand-ins' update: it is read exactly, and is not the text."""
    model = load("gpt2")
    batch = batch_of(model, sentences((5,), 4))
    how = TokenObfuscation(alike=1.0)
    client = Client(model, defenses=(how,))
    unaware = seen_of(client, batch, given=Given(defenses=False))
    found = build("attack", "dager", {})(unaware, stream(0, "attack")).sequences
    assert len(found) == 1
    assert found[0] != tuple(batch.sequences()[0])
    plain = build("attack", "dager", {})(seen_of(Client(model), batch), stream(0, "attack")).sequences
    assert plain == (tuple(batch.sequences()[0]),)
    assert client.update(batch, stream(0, "client")).defenses[0]["name"] == "token-obfuscation"


@pytest.mark.parametrize(("candidates", "alike"), [(1, 1.0), (8, 0.3)])
def test_the_words_a_stand_in_may_stand_for_are_those_that_have_it(load, candidates, alike):
    model = load("bert")
    words = [word for word in range(model.vocabulary_size) if word not in model.special.ids and model.content([word])]
    standing = {word: stand_ins(model, word, candidates, alike) for word in words}
    assert any(standing.values())
    for read in words[:: max(1, len(words) // 40)]:
        expected = {word: len(others) for word, others in standing.items() if read in others}
        assert stood_for(model, read, candidates, alike) == expected


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_an_attacker_who_is_told_guesses_back(load, monkeypatch, share):
    model = load("gpt2")
    batch = batch_of(model, [text for seed in range(4, 12) for text in sentences((5,), seed)])
    how = TokenObfuscation(alike=1.0, share=share)
    client, right = Client(model, defenses=(how,)), [0, 0]
    used = set(batch.ids.flatten().tolist())  # these words are made up: the frequencies of English are no guide
    monkeypatch.setattr(guess_back, "usual_places", lambda model: [9 - 9 * (t in used) for t in range(10**4)])
    for row, text in enumerate(batch.sequences()):
        labels = None if batch.labels is None else batch.labels[row : row + 1]
        one = replace(batch, ids=batch.ids[row : row + 1], mask=batch.mask[row : row + 1], labels=labels)
        read, guessed = (
            build("attack", "dager", {})(
                seen_of(client, one, given=Given(defenses=told), seed=row), stream(0, "attack")
            )
            for told in (False, True)
        )
        pairs = list(zip(guessed.sequences[0], read.sequences[0], strict=True))
        assert all(a == b or b in stand_ins(model, a, how.candidates, how.alike) for a, b in pairs)
        assert guessed.details["guessed_back"] == sum(a != b for a, b in pairs)
        assert "guessed_back" not in read.details
        assert set(guessed.certificates or ()) <= {"guess"}
        assert "stand-ins" in guessed.notes[-1]
        for place, found in enumerate((read, guessed)):
            right[place] += sum(a == b for a, b in zip(found.sequences[0], text, strict=True))
    assert right[1] > right[0], right


@pytest.mark.parametrize(
    ("share", "places", "expected"),
    [
        (1.0, {5: 3, 6: 3, 7: 3}, 6),  # as usual as 5, which has ten stand-ins for one of them to be drawn
        (1.0, {5: 0, 6: 99, 7: 3}, 5),  # much more usual than 6
        (0.6, {5: 3, 6: 3, 7: 3}, 6),
        (0.3, {5: 3, 6: 3, 7: 3}, 7),  # most words stay what they are
    ],
)
def test_the_word_behind_a_stand_in_is_the_likeliest(monkeypatch, share, places, expected):
    monkeypatch.setattr(guess_back, "usual_places", lambda model: places)
    monkeypatch.setattr(guess_back, "stand_ins", lambda model, token, candidates, alike: [1])
    monkeypatch.setattr(guess_back, "stood_for", lambda model, token, candidates, alike: {5: 10, 6: 1})
    model = SimpleNamespace(special=SimpleNamespace(ids={0}))
    told = {"candidates": 10, "alike": 0.9, "share": share}
    found = guess_back.guess_back(model, Reconstruction(sequences=((0, 7, 0),)), told)
    assert found.sequences == ((0, expected, 0),)


def test_all_attacks_on_text_reckon_with_it():
    for name, cls in known("attack").items():
        if "classification" in cls.tasks or "causal-lm" in cls.tasks:
            assert build("attack", name, {}).reckons_with("token-obfuscation"), name


def test_it_acts_before_all_others_and_composes(load):
    model = load("bert")
    with pytest.raises(BadInputError, match="changes the text acts before all others"):
        Client(model, defenses=(Gaussian(0.1), TokenObfuscation()))
    batch = batch_of(model, sentences((4, 6), 1))
    both = Client(model, defenses=(TokenObfuscation(alike=1.0), DPSGD(0.5, 0.0)))
    alone = Client(model, defenses=(DPSGD(0.5, 0.0),))
    one, other = (c.update(batch, stream(0, "client")) for c in (both, alone))
    assert [d["name"] for d in one.defenses] == ["token-obfuscation", "dp-sgd"]
    assert any(not torch.equal(one.tensors[n], other.tensors[n]) for n in one.tensors)
    norm = torch.cat([t.flatten() for t in one.tensors.values()]).norm()
    assert float(norm) <= 0.5 + 1e-6


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("sgd", 0.1)], ids=["gradient", "delta"])
def test_aegis_sends_no_attention_and_blurs_the_other_places(load, family, training):
    model = load(family)
    batch = batch_of(model, sentences((4, 6), 1))
    plain = Client(model, training).update(batch, stream(0, "client")).tensors
    update = Client(model, training, defenses=(Aegis(),)).update(batch, stream(0, "client"))
    names = ("query.", "key.", "value.", "attn.q.", "attn.k.", "attn.v.", "c_attn.", "q_proj.", "k_proj.", "v_proj.")
    silent = {name for name in plain if any(part in name for part in names)}
    assert len(silent) >= 2 * model.depth
    assert silent <= set(update.frozen)
    assert set(update.tensors) == set(plain) - silent
    up = {v.parameter for layer in range(model.depth) for v in model.views(layer, "f")}
    words = set(model.group("word"))
    for name, value in update.tensors.items():
        assert (value.shape, value.dtype) == (plain[name].shape, plain[name].dtype)
        if name in words:
            assert bool((plain[name].norm(dim=1) == 0).any())
            assert bool((value.norm(dim=1) > 0).all()), "a row of zeros would tell that the word is not there"
        elif name in up and training.optimizer == "none":
            unit = plain[name].double().square().mean().sqrt()
            noise = (value - plain[name]).double() / unit
            assert 0.9 < float(noise.std()) < 1.1
        elif training.optimizer == "none":
            torch.testing.assert_close(value, plain[name])
    with pytest.raises(NotSupportedError, match="query, key or value"):
        build("attack", "dager", {})(seen_of(Client(model, training, defenses=(Aegis(),)), batch), stream(0, "attack"))


def test_aegis_is_seeded_and_leaves_its_input(load):
    model = load("gpt2")
    batch = batch_of(model, sentences((4,), 1))
    plain = Client(model).update(batch, stream(0, "client")).tensors
    before = {n: t.clone() for n, t in plain.items()}
    one, again, other = (Aegis().on_roles(model, plain, stream(n, "x")) for n in (0, 0, 1))
    assert all(torch.equal(plain[n], before[n]) for n in plain)
    assert all(torch.equal(one[n], again[n]) for n in plain)
    assert any(not torch.equal(one[n], other[n]) for n in plain)
    assert isinstance(Aegis(), RoleDefense)
    assert isinstance(TokenObfuscation(), BatchDefense)


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [
        ("token-obfuscation", {"candidates": 0}, "candidates"),
        ("token-obfuscation", {"alike": 0.0}, "alike"),
        ("token-obfuscation", {"share": 1.5}, "share"),
        ("aegis", {"norm_noise": 0.0}, "norm_noise"),
        ("aegis", {"matrix_noise": float("inf")}, "matrix_noise"),
    ],
)
def test_parameters_outside_their_range_are_refused(name, values, field):
    with pytest.raises(BadInputError, match=f"defense '{name}': {field}"):
        build("defense", name, values)
