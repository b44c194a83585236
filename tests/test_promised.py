"""What defenses promise: the claims check's numbers where there is a bound, and nothing where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradaudit.accounting.check import check, number
from gradaudit.accounting.claim import parse_claims
from gradaudit.accounting.promised import promised
from gradaudit.audit.info import run_info
from gradaudit.audit.prepare import prepare
from gradaudit.case import parse_case
from gradaudit.registry import build, known
from made_reports import Markup, make_info, page

CLIP, SMALL = {"name": "clip", "norm": 1.0}, {"name": "gaussian", "sigma": 4.845e-5}


def said(*tables: dict[str, Any], steps: int = 1, tensors: int = 9) -> str | None:
    built = [build("defense", t["name"], {k: v for k, v in t.items() if k != "name"}) for t in tables]
    return promised(built, steps, tensors)


def claimed(**claim: Any) -> float:
    (one,) = parse_claims([{"name": "x", "examples": 4, "delta": 1e-5, **claim}])
    return {line.unit: line.one_round for line in check(one).supported}["example"]


def test_without_a_defense_there_is_nothing_to_say():
    assert said() is None


@pytest.mark.parametrize(
    "name", sorted(set(known("defense")) - {"dp-sgd", "gaussian", "normalized-gaussian", "laplace"})
)
def test_what_adds_no_noise_promises_nothing(name):
    assert str(said({"name": name})).startswith("Nothing: none of these defenses adds noise")


@pytest.mark.parametrize(
    "tables",
    [
        ({"name": "gaussian", "sigma": 1.0},),
        (CLIP, {"name": "gaussian", "sigma": 1.0, "relative": True}),
        ({"name": "gaussian", "sigma": 1.0}, CLIP),
        (CLIP, {"name": "quantize"}, {"name": "gaussian", "sigma": 1.0}),
        (CLIP, {"name": "error-feedback"}, {"name": "topk"}, {"name": "gaussian", "sigma": 1.0}),
        (CLIP, {"name": "sign"}, {"name": "gaussian", "sigma": 1.0}),
    ],
    ids=["no clip", "relative", "clip behind", "rounding between", "feedback between", "signs between"],
)
def test_noise_without_a_bound_before_it_promises_nothing(tables):
    assert str(said(*tables)).startswith("Nothing: the noise stands behind no bound")


def test_other_empty_promises_say_why():
    assert "Laplace noise without a bound" in str(said({"name": "laplace", "scale": 1.0}))
    assert "no noise is added" in str(said({"name": "dp-sgd", "noise_multiplier": 0.0}))


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("noise", [0.5, 4.0, 40.0])
def test_dp_sgd_has_the_epsilon_of_the_claims_check(noise, steps):
    pytest.importorskip("dp_accounting")
    found = str(said({"name": "dp-sgd", "noise_multiplier": noise}, {"name": "sign"}, steps=steps))
    expected = claimed(
        mechanism="dp-sgd", noise_multiplier=noise, batch_size=4, steps=steps, sampling="shuffled", neighbors="replace"
    )
    assert f"psilon {number(expected)} for one example" in found
    assert found.startswith("Little") == (expected > 10)


def test_a_clipped_update_has_the_epsilon_of_the_claims_check():
    pytest.importorskip("dp_accounting")
    assert "psilon 8.5e8 for the whole update" in str(said(CLIP, SMALL))
    for between in ((), ({"name": "topk"},), ({"name": "topk"}, {"name": "random-pruning"})):
        expected = claimed(mechanism="gaussian", clipped="update", clip=1.0, noise_std=3.0)
        assert f"psilon {number(expected)} for the whole update" in str(said(CLIP, *between, SMALL | {"sigma": 3.0}))
    expected = claimed(mechanism="gaussian", clipped="tensor", clip=1.0, tensors=9, noise_std=3.0)
    for tables in (
        (CLIP | {"per_tensor": True}, SMALL | {"sigma": 3.0}),
        ({"name": "normalized-gaussian", "sigma": 3.0},),
    ):
        assert f"psilon {number(expected)} for the whole update" in str(said(*tables))


def test_a_run_says_it_and_the_report_prints_it(folders):
    pytest.importorskip("dp_accounting")
    case = parse_case({
        "model": f"random:{folders['bert']}", "attack": {"name": "blind"}, "name": "guarded <b>",
        "defense": [{"name": "dp-sgd", "noise_multiplier": 4.0, "poisson": False}],
    })  # fmt: skip
    info = run_info(prepare(case, Path.cwd(), torch.device("cpu")))
    assert list(info.promises) == ["guarded <b>"]
    shown = Markup(page(info=make_info(promises=info.promises)))
    assert not shown.open
    assert info.promises["guarded <b>"] in shown.text
    assert "What the defenses promise" in shown.text
    assert "guarded <b>" in shown.text


def test_runs_without_defenses_or_from_before_have_no_such_section():
    assert make_info().promises == {}  # as a run.json of before is read
    assert "What the defenses promise" not in Markup(page()).text
