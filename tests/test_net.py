"""The net: no case changes its name, no attack its answer, no defense its counter, unless the changelog says so."""

from __future__ import annotations

import json

import pytest

import net

STORED = json.loads(net.STORED.read_text(encoding="utf8"))


def test_cases_keep_their_ids():
    assert net.cases() == STORED["cases"]


@pytest.mark.parametrize("attack", sorted(net.attacks()))
def test_attacks_answer_as_they_did(folders, tmp_path, attack):
    own = [(key, case) for key, case in net.records(folders) if key.split(" / ")[0] == attack]
    assert own
    for key, case in own:
        made, stored = net.outcome(case, tmp_path, True), STORED["records"][key]
        if key in net.ROUNDED:
            made, stored = net.rough(made), net.rough(stored)
        assert net.same(stored, made), f"{key}: {made}"


@pytest.mark.parametrize("attack", sorted(net.attacks()))
def test_attacks_run_or_are_refused_under_the_same_defenses(folders, tmp_path, attack):
    own = [(key, case) for key, case in net.support(folders) if key.split(" / ")[0] == attack]
    assert {key for key, _ in own} == {key for key in STORED["support"] if key.split(" / ")[0] == attack}
    for key, case in own:
        assert net.outcome(case, tmp_path, False) == STORED["support"][key], key


def test_the_net_would_notice():
    entry = STORED["records"]["dager / bert / plain"]
    assert net.same(entry, json.loads(json.dumps(entry)))
    moved = json.loads(json.dumps(entry))
    moved["record"]["scores"]["rougeL"] -= 1
    assert not net.same(entry, moved)
    moved = json.loads(json.dumps(entry))
    moved["record"]["spectrum"]["confidence"] /= 10
    assert not net.same(entry, moved)
    assert all(name in STORED["records"] for name in net.ROUNDED)
