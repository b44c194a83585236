"""Several clients whose updates are summed: the sum is theirs, each trains and defends its part alone."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import kstest

from gradaudit.client.client import Client
from gradaudit.defenses.dpsgd import DPSGD
from gradaudit.defenses.noise import Gaussian
from gradaudit.errors import BadInputError
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import LocalTraining
from tiny_models import SETTINGS, batch_of, seen_of, sentences


def flat(update) -> torch.Tensor:
    return torch.cat([t.double().flatten() for t in update.tensors.values()])


def sent(model, batch, **client) -> torch.Tensor:
    return flat(Client(model, **client).update(batch, stream(0, "client")))


@pytest.mark.parametrize("family", [family for family, task in SETTINGS if task == "classification"])
def test_undefended_gradients_of_equal_parts_have_the_mean_of_the_whole_batch(load, family):
    model = load(family)
    batch = batch_of(model, sentences((4, 6, 5, 7), 1))
    whole = sent(model, batch)
    for clients in (2, 4):
        assert float((sent(model, batch, clients=clients) - whole).norm()) < 1e-5 * float(whole.norm())


def test_each_client_takes_local_steps_on_its_own_part(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6, 5, 7), 1))
    training = LocalTraining("sgd", 0.5, epochs=3)
    parts = [sent(model, batch.take(torch.arange(at, at + 2)), training=training) for at in (0, 2)]
    together = sent(model, batch, training=training, clients=2)
    assert float((together - (parts[0] + parts[1]) / 2).norm()) < 1e-5 * float(together.norm())
    assert float((together - sent(model, batch, training=training)).norm()) > 1e-3 * float(together.norm())


def test_noise_of_clients_is_independent_and_adds_up_to_less(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6, 5, 7), 1))
    noise = sent(model, batch, clients=4, defenses=(Gaussian(0.1),)) - sent(model, batch, clients=4)
    assert kstest(noise[:20_000].numpy(), "norm", args=(0, 0.05)).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert kstest(noise[:20_000].numpy(), "norm", args=(0, wrong * 0.05)).pvalue < 1e-9


def test_each_client_clips_its_own_sentences(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6, 5, 7), 1))
    tight = DPSGD(clip=1e-2, noise_multiplier=0.0)
    together, whole = sent(model, batch, clients=2, defenses=(tight,)), sent(model, batch, defenses=(tight,))
    assert float((together - whole).norm()) < 1e-4 * float(whole.norm()), "the mean of all clipped gradients, both ways"


def test_what_is_read_from_the_sum_is_everyones(load):
    model = load("llama")
    batch = batch_of(model, sentences((4, 3, 5, 4), 1))
    client = Client(model, clients=4)
    found = build("attack", "dager", {})(seen_of(client, batch), stream(0, "attack"))
    assert {tuple(s) for s in batch.sequences()} == set(found.sequences)


def test_the_server_knows_all_sentences_and_as_many_steps_as_were_taken(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6, 5, 7), 1))
    update = Client(model, LocalTraining("sgd", 0.1, 2, minibatch=1), clients=2).update(batch, stream(0, "client"))
    assert update.training.steps(4) == LocalTraining("sgd", 0.1, 2, minibatch=1).steps(2)
    assert seen_of(Client(model, clients=2), batch).knowledge.batch_size == 4


@pytest.mark.parametrize(("clients", "said"), [(3, "equal parts"), (0, "at least 1")])
def test_parts_that_are_not_equal_are_refused(load, clients, said):
    model = load("bert")
    with pytest.raises(BadInputError, match=said):
        sent(model, batch_of(model, sentences((4, 6, 5, 7), 1)), clients=clients)
