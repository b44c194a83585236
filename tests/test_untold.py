"""One local step that nobody told of: what its weight change shows of it, and what is read so."""

from __future__ import annotations

import pytest

from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.leakage.uneven.untold import step_shown
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining
from tiny_models import batch_of, seen_of, sentences

ADAMW = [("all", 5e-5, 0.01, {"clip_norm": 1.0}), ("0:q,k,v", 4.3712e-5, 0.1, {}), ("0:q,k,v", 1e-3, 0.0, {})]


@pytest.fixture(scope="module")
def minilm():
    return load_model(ModelSpec("minilm"))


@pytest.mark.minilm
@pytest.mark.parametrize(("selection", "rate", "decay", "more"), ADAMW)
def test_a_step_of_adamw_shows_its_rate_and_its_decay(minilm, selection, rate, decay, more):
    how = LocalTraining("adamw", rate, weight_decay=decay, **more)
    found = step_shown(seen_of(Client(minilm, how), batch_of(minilm, sentences((4, 6), 1)), selection))
    assert found is not None
    assert found.optimizer == "adamw"
    assert found.learning_rate == pytest.approx(rate, rel=1e-5)
    assert found.weight_decay == pytest.approx(decay, rel=1e-2)


def test_any_other_change_is_one_of_sgd_at_some_scale(load):
    model = load("bert")
    found = step_shown(seen_of(Client(model, LocalTraining("sgd", 0.3)), batch_of(model, sentences((4, 6), 1))))
    assert found == LocalTraining("sgd", 1.0)


def test_nothing_that_moved_shows_nothing(load):
    model = load("bert")
    seen = seen_of(Client(model, LocalTraining("sgd", 0.3)), batch_of(model, sentences((4, 6), 1)))
    for change in seen.tensors.values():
        change.zero_()
    assert step_shown(seen) is None


@pytest.mark.minilm
def test_sentences_are_read_and_proven_where_nothing_was_told(minilm):
    """Neither optimizer, rate, number of sentences, dropout nor defenses."""
    batch = make_batch(minilm, ["Rufus owes Clara nine euros.", "My key lies under the third pot."], [0, 1])
    client = Client(minilm, LocalTraining("adamw", 2e-5, weight_decay=0.01), dropout=True)
    given = Given(batch_size=False, training=False, dropout=False, defenses=False)
    seen = seen_of(client, batch, "all", given, 3)
    assert seen.knowledge.training is None
    found = Decode()(seen, stream(0, "attack"))
    assert sorted(found.sequences) == sorted(map(tuple, batch.sequences()))
    assert found.certificates == ("proven",) * 2
    assert "one step of AdamW at 2e-05 and a weight decay of about 0.0" in found.notes[-1]


@pytest.mark.minilm
def test_two_steps_are_not_taken_for_one_that_explains_them(minilm):
    how = LocalTraining("adamw", 5e-5, epochs=2)
    seen = seen_of(
        Client(minilm, how, dropout=True), batch_of(minilm, sentences((4, 6), 1)), "all", Given(training=False)
    )
    found = Decode()(seen, stream(0, "attack"))
    assert "proven" not in (found.certificates or ())
    assert "was not told" in found.notes[-1]
