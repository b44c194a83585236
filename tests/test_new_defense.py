"""A defense that nobody foresaw is countered, refused or flagged by what it says of itself, not by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from gradaudit import registry
from gradaudit.accounting.promised import promised
from gradaudit.audit.prepare import uncountered
from gradaudit.client.client import Client
from gradaudit.defense_traits import Law, Trait
from gradaudit.defenses.base import UpdateDefense
from gradaudit.judge.flags import modeled
from gradaudit.leakage.matching.counters import countered
from gradaudit.leakage.matching.distances import OnSupport, SquaredL2, WrongSigns
from gradaudit.registry import build, register
from gradaudit.streams import stream
from gradaudit.types import Given
from tiny_models import batch_of, seen_of, sentences


def every_third(**said: object) -> type[UpdateDefense]:
    """Return a defense of one file: it sends every third coordinate alone, and says of itself what is given."""

    @dataclass(frozen=True)
    class EveryThird(UpdateDefense):
        """Send every third coordinate."""

        name: ClassVar[str] = "every-third"
        traits: ClassVar[frozenset[Trait]] = said.get("traits", UpdateDefense.traits)  # type: ignore[assignment]
        law: ClassVar[Law | None] = said.get("law")  # type: ignore[assignment]
        deterministic: ClassVar[bool] = True

        def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
            keep = {n: (torch.arange(t.numel(), device=t.device) % 3 == 0).view_as(t) for n, t in tensors.items()}
            return {name: value * keep[name] for name, value in tensors.items()}

        def bound(self, before: float | None, tensors: int) -> float | None:
            return before

    return EveryThird


@pytest.fixture
def registered(monkeypatch):
    registry.known("attack")
    registry.known("defense")
    monkeypatch.setattr(registry, "_entries", {kind: dict(table) for kind, table in registry._entries.items()})

    def add(**said: object) -> UpdateDefense:
        registry._entries["defense"].pop("every-third", None)
        defense: UpdateDefense = register(every_third(**said))()
        return defense

    return add


def seen(load, defense: UpdateDefense, told: bool = True):
    model = load("bert")
    client = Client(model, defenses=(defense,))
    return seen_of(client, batch_of(model, sentences((4,), 1), [1]), given=Given(True, True, True, defenses=told))


@pytest.mark.parametrize(("attack", "runs"), [
    ("tag", True), ("lamp", True), ("grab", True), ("exchange", True), ("decode", True), ("lti", True),
    ("dager", False), ("blind", True)])  # fmt: skip
def test_attacks_that_handle_its_trait_run_and_others_are_refused(load, registered, attack, runs):
    defense = registered(traits=frozenset({"support"}))
    found = uncountered(build("attack", attack, {}), (defense,), load("bert"), 1)
    assert found == (None if runs else "every-third")


def test_its_counter_is_that_of_its_trait(load, registered):
    assert isinstance(countered(SquaredL2(), seen(load, registered(traits=frozenset({"support"}))), "tag"), OnSupport)
    assert isinstance(countered(SquaredL2(), seen(load, registered(traits=frozenset({"signs"}))), "tag"), WrongSigns)
    plain = countered(SquaredL2(), seen(load, registered(traits=frozenset({"zero mean"}))), "tag")
    assert isinstance(plain, SquaredL2)


def test_one_that_says_nothing_is_refused_and_flagged(load, registered):
    silent = registered()
    for attack in ("tag", "lamp", "grab", "decode", "exchange", "dager"):
        built = build("attack", attack, {})
        assert uncountered(built, (silent,), load("bert"), 1) == "every-third"
        assert not modeled(built, "every-third", seen(load, silent, told=False), 1)
    assert modeled(build("attack", "blind", {}), "every-third", seen(load, silent), 1)


def test_matching_reads_through_it_and_what_it_promises_is_said(load, registered):
    defense = registered(traits=frozenset({"support"}))
    found = build("attack", "tag", {"steps": 3})(seen(load, defense), stream(0, "attack"))
    assert found.count == 1
    noise, clip = build("defense", "gaussian", {"sigma": 4.0}), build("defense", "clip", {"norm": 1.0})
    bounded = promised((clip, defense, noise), 1, 3)
    assert bounded is not None
    assert bounded.startswith("Epsilon")
    unbounded = promised((defense, noise), 1, 3)
    assert unbounded is not None
    assert "no bound" in unbounded
