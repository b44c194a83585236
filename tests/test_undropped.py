"""Weight changes of encoders whose dropout was off: sentences by the second block, proven by the whole step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.decoding.mending import misfit
from gradaudit.leakage.decoding.pairs import candidate_pairs
from gradaudit.leakage.rowspace.subspace import span
from gradaudit.leakage.uneven.undropped import _mended
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining
from tiny_models import ENCODERS, batch_of, seen_of, sentences, tiny

SGD = LocalTraining("sgd", 0.01)


def read(model, batch, how: LocalTraining = SGD, selection: str = "all", given: Given | None = None):
    seen = seen_of(Client(model, how), batch, selection, given or Given())
    return Decode()(seen, stream(0, "attack"))


def told(batch) -> dict[tuple[int, ...], int]:
    return dict(zip(map(tuple, batch.sequences()), batch.labels.tolist(), strict=True))


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_is_read_exactly_and_proven_with_its_labels(load, family, optimizer):
    """Eps as large as the tiny models' gradients; Adam's own would leave their signs alone."""
    model = load(family)
    batch = batch_of(model, sentences((4, 5), 1), [1, 0])
    how = SGD if optimizer == "sgd" else LocalTraining("adamw", 1e-3, weight_decay=0.1, eps=1e-2)
    found = read(model, batch, how)
    assert dict(zip(found.sequences, found.labels or (), strict=True)) == told(batch)
    assert found.certificates == ("proven",) * 2
    assert found.details["chi2"] < 1.1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("distinct", [True, False])
def test_what_is_called_proven_was_in_the_batch(load, seed, distinct):
    """Words that occur several times, and shares that nobody told, up to more tokens than the width."""
    model = load("bert")
    batch = batch_of(
        model, sentences((3, 5, 4, 6)[: 2 + seed % 3], seed, distinct=distinct), [1, 0, 1, 1][: 2 + seed % 3]
    )
    found = read(model, batch, given=Given(batch_size=False, dropout=False))
    proven = {s for s, sure in zip(found.sequences, found.certificates or (), strict=True) if sure == "proven"}
    assert proven <= set(told(batch))


@pytest.mark.parametrize("hidden", ["batch_size", "dropout"])
def test_it_needs_neither_the_batch_size_nor_the_dropout_rate(load, hidden):
    model = load("bert")
    batch = batch_of(model, sentences((4, 5), 1), [1, 0])
    found = read(model, batch, given=replace(Given(), **{hidden: False}))
    assert dict(zip(found.sequences, found.labels or (), strict=True)) == told(batch)
    assert found.certificates == ("proven",) * 2


def test_copies_come_back_as_often_as_they_were_there(load):
    model = load("bert")
    one, other = sentences((4, 5), 1)
    batch = batch_of(model, [one, other, one], [1, 0, 1])
    found = read(model, batch)
    assert sorted(found.sequences) == sorted(map(tuple, batch.sequences()))
    assert found.certificates == ("proven",) * 3
    assert sorted(found.labels or ()) == [0, 1, 1]


def test_a_clipped_gradient_is_read_whatever_its_scale(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 5), 1), [1, 0])
    found = read(model, batch, replace(SGD, learning_rate=1.0, clip_norm=1e-3))
    assert dict(zip(found.sequences, found.labels or (), strict=True)) == told(batch)
    assert found.certificates == ("proven",) * 2


def test_smoothed_labels_are_proven_and_not_named(load):
    """One of these two sentences is surer than its smoothed label, which turns its gradient's sign."""
    model = load("bert")
    batch = batch_of(model, sentences((4, 5), 1), [1, 0])
    found = read(model, batch, replace(SGD, label_smoothing=0.2))
    assert set(found.sequences) == set(told(batch))
    assert found.certificates == ("proven",) * 2
    assert found.labels is None


def test_three_labels_are_told_apart(load):
    model = load("bert", labels=3)
    batch = batch_of(model, sentences((4, 5, 3), 1), [2, 0, 1])
    found = read(model, batch)
    assert dict(zip(found.sequences, found.labels or (), strict=True)) == told(batch)
    assert found.certificates == ("proven",) * 3


def test_several_steps_that_add_up_are_read_and_not_proven(load):
    """The second minibatch's gradient is of weights that the first one moved."""
    model = load("bert")
    batch = batch_of(model, sentences((4, 5), 1), [1, 0])
    found = read(model, batch, replace(SGD, learning_rate=1e-4, minibatch=1))
    assert set(found.sequences) == set(told(batch))
    assert found.certificates == ("likely",) * 2
    assert any("nothing is proven" in note for note in found.notes)


def test_a_word_that_another_one_could_stand_for_is_not_proven(folders):
    model = tiny(folders["bert"])
    batch = batch_of(model, sentences((4, 5), 1), [1, 0])
    first, second = map(tuple, batch.sequences())
    unused = next(t for t in range(model.vocabulary_size) if t not in {*first, *second, *model.special.ids})
    with torch.no_grad():
        words = model.parameters()[model.group("word")[0]]
        words[unused] = words[first[2]]
    found = read(model, batch)
    sure = {len(s): c for s, c in zip(found.sequences, found.certificates or (), strict=True)}
    assert sure == {len(first): "likely", len(second): "proven"}


def test_a_block_of_another_batch_proves_nothing(load):
    model = load("bert")
    batch, others = (batch_of(model, sentences((4, 5), seed), [1, 0]) for seed in (1, 2))
    seen, forged = (seen_of(Client(model, SGD), one, "all", Given()) for one in (batch, others))
    names = {view.parameter for role in "qkv" for view in model.views(1, role)}
    mixed = {name: (forged if name in names else seen).tensors[name] for name in seen.tensors}
    with pytest.raises(NotSupportedError, match="no sentence"):
        Decode()(replace(seen, tensors=mixed), stream(0, "attack"))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("quantize", {"bits": 8}),
        ("quantize", {"bits": 16}),
        ("gaussian", {"sigma": 0.05, "relative": True}),
        ("normalized-gaussian", {"sigma": 1e-3}),
        ("random-pruning", {"rate": 0.3}),
    ],
    ids=str,
)
def test_gradients_behind_integers_noise_and_pruning_are_proven(load, name, fields):
    """Each tensor may have been normalized by itself."""
    model = load("bert")
    batch = batch_of(model, sentences((4, 3), 1), [1, 0])
    client = Client(model, defenses=(build("defense", name, fields),))
    found = Decode()(seen_of(client, batch, "all", Given()), stream(0, "attack"))
    assert set(found.sequences) == set(told(batch))
    assert found.certificates == ("proven",) * 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_so_much_noise_that_wrong_sentences_fit_names_none_of_them(load, seed, sigma):
    model = load("bert")
    batch = batch_of(model, sentences((4, 3), seed), [1, 0])
    client = Client(model, defenses=(build("defense", "gaussian", {"sigma": sigma, "relative": True}),))
    found = Decode()(seen_of(client, batch, "all", Given()), stream(0, "attack"))
    named = {s for s, sure in zip(found.sequences, found.certificates or (), strict=True) if sure != "guess"}
    assert named <= set(told(batch))


@pytest.mark.parametrize("places", [(2,), (3,), (2, 4)], ids=str)
def test_wrong_words_of_a_long_sentence_are_exchanged(load, places):
    """Their places lie farthest off: one word by one of all that stood there, two by each other."""
    model = load("bert")
    batch = batch_of(model, sentences((8, 5), 3), [1, 0])
    seen = seen_of(Client(model), batch, "all", Given())
    first, second = span(seen, 0), span(seen, 1)
    assert first is not None
    assert second is not None
    pairs = candidate_pairs(model, first, 12)
    right = max(told(batch), key=len)
    wrong = list(right)
    if len(places) == 1:
        there = pairs.tokens[pairs.positions == places[0]].tolist()
        wrong[places[0]] = next(t for t in there if t != right[places[0]])
    else:
        wrong[places[0]], wrong[places[1]] = right[places[1]], right[places[0]]
    every, _ = misfit(model, second, [tuple(wrong)])
    sentence, rows = _mended(model, second, pairs, tuple(wrong), every[0, : len(wrong)])
    assert sentence == right
    assert float(rows.square().mean()) < 1 < float(every.square().mean())


def test_one_block_alone_is_refused_and_says_what_is_missing(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 5), 1), [1, 0])
    with pytest.raises(NotSupportedError, match="blocks 0 and 1"):
        read(model, batch, selection="0:q,k,v")


def test_under_autocast_sentences_are_read_and_not_proven(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 5), 1), [1, 0])
    found = read(model, batch, LocalTraining("none", precision="bf16"))
    assert set(found.sequences) == set(told(batch))
    assert found.certificates == ("likely",) * 2


@pytest.mark.minilm
def test_a_real_model_s_gradients_are_made_as_autocast_makes_them():
    """Made in float32 they leave a chi^2 of 90,000; as autocast rounds 300, and on AMX 4,400."""
    model = load_model(ModelSpec("minilm"))
    batch = make_batch(model, ["Rufus owes Clara nine euros.", "My key lies under the third pot."], [0, 1])
    found = read(model, batch, LocalTraining("none", precision="bf16"), "0-1:q,k,v")
    assert dict(zip(found.sequences, found.labels or (), strict=True)) == told(batch)
    assert found.certificates == ("likely",) * 2
    assert found.details["chi2"] < 10_000


@pytest.mark.minilm
def test_a_step_as_the_trainer_takes_it_is_read_though_nothing_was_told():
    model = load_model(ModelSpec("minilm"))
    batch = make_batch(model, ["Rufus owes Clara nine euros.", "My key lies under the third pot."], [0, 1])
    how = LocalTraining("adamw", 5e-5, weight_decay=0.01, clip_norm=1.0)
    given = Given(batch_size=False, training=False, dropout=False, defenses=False)
    found = read(model, batch, how, given=given)
    assert dict(zip(found.sequences, found.labels or (), strict=True)) == told(batch)
    assert found.certificates == ("proven",) * 2
