"""The registry: what may enter, how it is built from plain values, and the sentence for what does not fit."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest

from gradaudit import registry
from gradaudit.attacks.base import Attack
from gradaudit.errors import BadInputError, unknown_name
from gradaudit.registry import build, describe, hyper, known, register
from gradaudit.types import Reconstruction


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    known("attack"), known("defense")
    monkeypatch.setattr(registry, "_entries", {kind: dict(table) for kind, table in registry._entries.items()})
    monkeypatch.setattr(registry, "_loaded", set(registry._loaded))


def attack_class(called: str, frozen: bool = True) -> type[Any]:
    class Made(Attack):
        """An attack of the tests."""

        name: ClassVar[str] = called
        source: ClassVar[str] = "tests"
        steps: int = hyper(3, "steps")
        mode: Literal["a", "b"] = hyper("a", "which way")

        def run(self, seen, rng):
            return Reconstruction(())

    return dataclass(frozen=frozen)(Made)


def test_a_registered_class_is_known_built_and_described():
    cls = register(attack_class("mine"))
    assert known("attack")["mine"] is cls
    item = build("attack", "mine", {"steps": 7, "mode": "b"})
    assert (type(item), item.steps, item.mode) == (cls, 7, "b")
    assert describe(item) == {"name": "mine", "steps": 7, "mode": "b"}
    assert build("attack", "mine", {}) == cls()
    assert list(known("attack")) == sorted(known("attack"))
    assert "mine" not in known("defense")


def test_all_built_in_ones_are_found():
    assert {"blind", "dager", "dlg", "tag"} <= set(known("attack"))
    assert {"gaussian"} <= set(known("defense"))


def test_a_taken_name_is_refused_and_the_first_one_stays():
    before = known("attack")["dager"]
    with pytest.raises(TypeError, match="attack 'dager' is registered twice"):
        register(attack_class("dager"))
    assert known("attack")["dager"] is before


def test_what_is_not_a_frozen_dataclass_with_a_name_is_refused():
    class Bare(Attack):
        name = "bare"

        def run(self, seen, rng):
            return Reconstruction(())

    @dataclass(frozen=True)
    class Nameless(Attack):
        def run(self, seen, rng):
            return Reconstruction(())

    @dataclass(frozen=True)
    class Kindless:
        name: ClassVar[str] = "kindless"

    for wrong in (attack_class("thawed", frozen=False), Bare):
        with pytest.raises(TypeError, match="must be a frozen dataclass"):
            register(wrong)
    for wrong in (Nameless, Kindless):
        with pytest.raises(TypeError, match="needs a class attribute `name`"):
            register(wrong)
    assert not {"thawed", "bare", "kindless"} & set(known("attack"))


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("dagger", {}, "unknown attack 'dagger'; did you mean 'dager'?"),
        ("zzzzzz", {}, "unknown attack 'zzzzzz'; known: auto, blind, dager"),
        ("tag", {"step": 5}, "unknown field of attack 'tag' 'step'; did you mean 'steps'?"),
        ("tag", {"name": "x"}, "unknown field of attack 'tag' 'name'"),
        ("tag", {"steps": "many"}, "attack 'tag': steps: "),
        ("tag", {"steps": 1.5}, "attack 'tag': steps: "),
        ("dager", {"rank": "papers"}, "got 'papers'"),
        ("dager", {"roles": 3}, "attack 'dager': roles: "),
    ],
)
def test_values_that_do_not_fit_get_a_sentence(name, values, sentence):
    with pytest.raises(BadInputError) as caught:
        build("attack", name, values)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_errors_of_the_class_itself_come_through():
    with pytest.raises(BadInputError, match="sigma must be above 0 and finite, got -1"):
        build("defense", "gaussian", {"sigma": -1})


def test_suggestions_are_for_near_names_only():
    assert "did you mean 'gaussian'" in str(unknown_name("defense", "gausian", ["gaussian", "sign"]))
    assert str(unknown_name("defense", "qqq", ["b", "a"])) == "unknown defense 'qqq'; known: a, b"


def test_hyper_keeps_meaning_unit_and_source_beside_the_default():
    (steps, _) = dataclasses.fields(attack_class("mine"))
    assert (steps.default, dict(steps.metadata)) == (
        3,
        {"about": "steps", "unit": "", "source": "", "later": False, "deltas": False},
    )


def test_plugins_of_other_packages_are_imported_on_first_use(monkeypatch, tmp_path):
    (tmp_path / "some_plugin.py").write_text(
        "from dataclasses import dataclass\n"
        "from gradaudit.attacks.base import Attack\n"
        "from gradaudit.registry import register\n"
        "@register\n@dataclass(frozen=True)\n"
        "class Foreign(Attack):\n    name = 'foreign'\n    source = 'elsewhere'\n    def run(self, seen, rng): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    asked = []

    def entry_points(*, group):
        asked.append(group)
        return [SimpleNamespace(name="p", value="some_plugin")]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert "foreign" not in known("attack"), "loaded before"
    registry._loaded.clear()
    assert known("attack")["foreign"].__module__ == "some_plugin"
    assert asked == ["gradaudit.plugins"]
    monkeypatch.delitem(sys.modules, "some_plugin")
