"""Ctrl-C in an attack: what it had come to is its answer; before there is any, there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of, observation
from gradaudit.data.images import load_images
from gradaudit.data.spec import DataSpec
from gradaudit.models.images import load_image_model
from gradaudit.models.spec import ModelSpec
from gradaudit.progress import StoppedError, shown_by
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given, Reconstruction
from tiny_models import batch_of, seen_of, sentences

TAG = {"name": "tag", "steps": 40}
GRAB = {"name": "grab", "steps": 2, "starts": 2, "permutations": 2, "passes": 1, "beam_width": 1, "learn_masks": False}


@pytest.fixture
def seen(load):
    model = load("bert")
    given = Given(lengths=True, longest=True, labels=True)
    return seen_of(Client(model, dropout=False), batch_of(model, sentences((5, 3), 1)), given=given)


def attacked(attack: dict[str, Any], seen: Any) -> Reconstruction:
    fields = {name: value for name, value in attack.items() if name != "name"}
    return build("attack", attack["name"], fields)(seen, stream(0, "attack"))


def stopped(attack: dict[str, Any], seen: Any, what: str, times: int = 1) -> Reconstruction:
    """Return what is left where the user presses Ctrl-C when so many steps of a kind are reported."""
    left = times

    def pressing(told: str, done: int, total: int | None) -> None:
        nonlocal left
        left -= what in told
        if left == 0:
            raise KeyboardInterrupt

    with shown_by(pressing), pytest.raises(KeyboardInterrupt) as stop:
        attacked(attack, seen)
    if not isinstance(stop.value, StoppedError):
        raise stop.value
    return stop.value.found


@pytest.mark.parametrize(
    "attack", [TAG, {"name": "dlg", "steps": 40}, {"name": "dlg", "steps": 9, "optimizer": "lbfgs"}]
)
def test_a_descent_stopped_after_three_steps_answers_as_one_of_three_steps(seen, attack: dict[str, Any]):
    found = stopped(attack, seen, attack["name"], 3)
    whole = attacked(attack | {"steps": 3}, seen)
    assert found.sequences == whole.sequences
    assert found.details == whole.details


def test_lamp_stopped_answers_with_the_best_point_until_then(seen):
    lamp = {"name": "lamp", "steps": 40, "edits": 0, "permutations": 0, "starts": 1}
    # of one step less, which measures its last point too
    assert stopped(lamp, seen, "lamp", 4).sequences == attacked(lamp | {"steps": 3}, seen).sequences


def test_grab_stopped_in_its_second_round_answers_as_after_the_first(seen):
    found = stopped(GRAB | {"rounds": 3}, seen, "grab: matching", 3)
    assert found.sequences == attacked(GRAB | {"rounds": 1}, seen).sequences


def test_exchange_stopped_answers_with_the_likeliest_guess_until_then(seen):
    found = stopped({"name": "exchange"}, seen, "exchange", 3)
    start = stopped({"name": "exchange"}, seen, "exchange", 1)
    assert found.details["likeness"] > start.details["likeness"]
    assert len(found.sequences) == 2


def test_dager_stopped_answers_with_the_sentences_found(seen):
    whole = attacked({"name": "dager"}, seen)
    assert len(whole.sequences) == 2
    short = min(whole.sequences, key=len)
    found = stopped({"name": "dager"}, seen, f"dager: length {len(short) + 2}")
    assert found.sequences == (short,)


@pytest.mark.parametrize("attack", [{"name": "dager"}, {"name": "decode"}])
def test_before_anything_was_found_ctrl_c_is_ctrl_c(seen, attack: dict[str, Any]):
    with pytest.raises(KeyboardInterrupt) as stop:
        stopped(attack, seen, attack["name"])
    assert not isinstance(stop.value, StoppedError)


def test_images_stopped_are_shown_as_they_are():
    pytest.importorskip("sklearn")
    model = load_image_model(ModelSpec("lenet", "image-classification", 10, 0, image=(1, 8, 8)))
    digits = load_images(DataSpec(source="digits"), Path())
    update = Client(model).update(digits.batch((0,)), stream(0, "client"))
    seen = observation(model, update, Selection("all"), knowledge_of(digits.batch((0,)), update, Given(labels=True)))
    found = stopped({"name": "ig", "steps": 40, "restarts": 1}, seen, "ig", 3)
    start = stopped({"name": "ig", "steps": 40, "restarts": 1}, seen, "ig", 1)
    assert found.images is not None
    assert found.images.shape == (1, *model.shape)
    assert found.details["distance"] < start.details["distance"]


def test_what_the_attack_that_was_stopped_had_counts_in_auto(seen):
    auto = {"name": "auto", "suite": ("tag", "lamp"), "budget": 1e6}
    found = stopped(auto, seen, "tag", 3)
    assert found.by == "tag"
    assert found.sequences[0]
    assert found.notes[-1] == "auto tried: tag (stopped with Ctrl-C)"
