"""The claims check: epsilon against integration and the published values, and verdicts a reader can act on."""

from __future__ import annotations

import builtins
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from typer.testing import CliRunner

from gradaudit.accounting.check import ClaimCheck, check
from gradaudit.accounting.claim import MODELS, load_claims, parse_claims
from gradaudit.accounting.epsilon import EXACT, gaussian_epsilon, sampled_epsilons
from gradaudit.cli import app
from gradaudit.errors import BadInputError

ROOT = Path(__file__).resolve().parent.parent
STOCK = ROOT / "cases" / "claims"
GAUSSIAN: dict[str, Any] = {
    "name": "noise", "mechanism": "gaussian", "clipped": "example", "clip": 1.0, "noise_std": 4.845e-5, "examples": 200,
}  # fmt: skip
SGD: dict[str, Any] = {
    "name": "sgd", "mechanism": "dp-sgd", "noise_multiplier": 1.0, "batch_size": 64, "examples": 8551, "steps": 134,
    "sampling": "poisson",
}  # fmt: skip


def found(**values: Any) -> ClaimCheck:
    return check(parse_claims([values])[0])


def epsilon(finding: ClaimCheck, unit: str, all_rounds: bool = False) -> float:
    (line,) = (line for line in finding.supported if line.unit == unit)
    return line.all_rounds if all_rounds else line.one_round


def hockey_stick(ratio: float, rate: float, eps: float) -> float:
    """Delta of one step by integration: both directions of a Gaussian of noise `ratio` at 0 and its mixture with 1."""
    x = np.linspace(-40 * ratio, 40 * ratio + 1, 2_000_001)
    zero, one = norm.pdf(x, 0, ratio), norm.pdf(x, 1, ratio)
    mixed = (1 - rate) * zero + rate * one
    dx = x[1] - x[0]
    return max(float(np.maximum(p - math.exp(eps) * q, 0).sum() * dx) for p, q in ((mixed, zero), (zero, mixed)))


@pytest.mark.parametrize(
    ("unit", "examples", "rounds", "value"),
    [
        ("client", 200, 1, 8.5e8),
        ("example", 200, 1, 22_181),
        ("example", 20_000, 1, 10.4),
        ("example", 20_000, 50, 168),
    ],
)
def test_the_known_values_of_one_noise(unit: str, examples: int, rounds: int, value: float):
    finding = found(**GAUSSIAN | {"examples": examples, "rounds": rounds})
    assert epsilon(finding, unit, all_rounds=True) == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize(("ratio", "delta"), [(0.5, 1e-5), (1.0, 1e-6), (3.0, 1e-3), (20.0, 1e-4)])
def test_gaussian_epsilon_is_where_the_integral_meets_delta(ratio: float, delta: float):
    eps = gaussian_epsilon(ratio * 7.0, 7.0, delta)
    assert hockey_stick(ratio, 1.0, eps) == pytest.approx(delta, rel=1e-3)


def test_rounds_compose_as_one_mechanism_of_less_noise():
    assert gaussian_epsilon(3.0, 1.0, 1e-5, 9) == pytest.approx(gaussian_epsilon(1.0, 1.0, 1e-5), rel=1e-9)
    assert gaussian_epsilon(3.0, 1.0, 1e-5, 9) < 9 * gaussian_epsilon(3.0, 1.0, 1e-5)


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_no_accountant_says_less_than_one_sampled_step_by_integration(rate: float):
    by = sampled_epsilons(0.8, rate, 1, 1e-5)
    assert set(by) == {"Opacus, RDP", "Opacus, PRV", "dp-accounting, RDP", "dp-accounting, PLD"}
    for name, eps in by.items():
        assert eps is not None
        # the PRV accountant's own error is 0.01 in epsilon
        assert hockey_stick(0.8, rate, eps) <= 1e-5 * 1.01, name
    pld = by["dp-accounting, PLD"]
    assert pld is not None
    assert hockey_stick(0.8, rate, pld - 0.01) > 1e-5


def test_accountants_without_sampling_are_above_the_exact_one():
    by = sampled_epsilons(2.0, 1.0, 50, 1e-5)
    exact = by.pop(EXACT)
    assert exact == pytest.approx(gaussian_epsilon(2.0, 1.0, 1e-5, 50))
    assert all(value is not None and value >= exact - 0.02 for value in by.values())


def test_numeric_accountants_are_not_asked_where_they_would_fill_the_memory():
    by = sampled_epsilons(0.01, 1.0, 1, 1e-5)
    assert by["Opacus, PRV"] is None
    assert by["dp-accounting, PLD"] is None
    assert by[EXACT] == pytest.approx(gaussian_epsilon(0.01, 1.0, 1e-5))


def test_one_example_is_worth_less_only_where_each_is_clipped():
    whole = found(**GAUSSIAN | {"clipped": "update"})
    assert epsilon(whole, "example") == epsilon(whole, "client") == epsilon(found(**GAUSSIAN), "client")
    assert any("may be the whole update" in remark for remark in whole.remarks)
    assert epsilon(found(**GAUSSIAN), "example") < epsilon(whole, "example") / 1000


def test_tensors_clipped_one_by_one_count_together():
    tensors = found(**GAUSSIAN | {"clipped": "tensor", "tensors": 16, "noise_std": 8.0})
    assert epsilon(tensors, "example") == epsilon(tensors, "client")
    assert epsilon(tensors, "client") == pytest.approx(gaussian_epsilon(1.0, 1.0, 1e-5))


@pytest.mark.parametrize("clipped", ["update", "example"])
def test_a_client_that_is_there_or_not_has_half_the_sensitivity_and_an_example_has_not(clipped: str):
    """Two opposite examples: with both the mean is zero, without one it is the other, at the bound."""
    there = found(**GAUSSIAN | {"clipped": clipped, "neighbors": "add-or-remove", "noise_std": 1.0, "examples": 2})
    assert epsilon(there, "client") == pytest.approx(gaussian_epsilon(1.0, 1.0, 1e-5))
    change = 2.0 if clipped == "update" else 1.0
    assert epsilon(there, "example") == pytest.approx(gaussian_epsilon(1.0, change, 1e-5))
    assert epsilon(found(**GAUSSIAN | {"noise_std": 1.0}), "client") == pytest.approx(gaussian_epsilon(1.0, 2.0, 1e-5))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (GAUSSIAN | {"clipped": "nothing", "clip": None}, "nothing is clipped"),
        (GAUSSIAN | {"noise_std": 0.0}, "noise is zero"),
        (GAUSSIAN | {"unprotected": ["batch statistics"]}, "batch statistics are sent as they are"),
        (SGD | {"noise_multiplier": 0.0}, "noise is zero"),
        ({"name": "n", "mechanism": "none"}, "no noise is added"),
        ({"name": "l", "mechanism": "laplace", "bound": None, "coordinates": 9, "noise_scale": 1.0, "examples": 2},
         "no coordinate is limited"),
        ({"name": "l", "mechanism": "laplace", "bound": 1.0, "coordinates": 9, "noise_scale": 0.0, "examples": 2},
         "noise is zero"),
    ],
)  # fmt: skip
def test_what_has_no_guarantee_is_void_whatever_is_declared(values: dict[str, Any], reason: str):
    finding = found(**values | {"declared_epsilon": 1e9, "unit": "client"})
    assert finding.verdict == "void"
    assert finding.supported == ()
    assert reason in finding.sentence
    assert math.isinf(finding.holds)


def test_a_claim_is_judged_for_its_own_unit_and_time():
    said = GAUSSIAN | {"examples": 20_000, "rounds": 50, "declared_epsilon": 11.0}
    assert found(**said, unit="example", declared_for="round").verdict == "supported"
    assert found(**said, unit="example", declared_for="training").verdict == "not supported"
    assert found(**said, unit="client", declared_for="round").verdict == "not supported"
    assert found(**GAUSSIAN).verdict == "nothing declared"


def test_a_supported_claim_of_a_large_epsilon_says_what_it_is_worth():
    large = found(**GAUSSIAN | {"declared_epsilon": 3e4, "unit": "example"})
    assert large.verdict == "supported"
    assert any("promises little" in remark for remark in large.remarks)
    small = found(**GAUSSIAN | {"noise_std": 5.0, "declared_epsilon": 5.0, "unit": "example"})
    assert not any("promises little" in remark for remark in small.remarks)


def test_shuffled_batches_gain_nothing_by_sampling():
    shuffled, sampled = found(**SGD | {"sampling": "shuffled"}), found(**SGD)
    # 133 full batches; the rest may be left out, and a pass begin anew at the 134th step
    assert epsilon(shuffled, "example") == pytest.approx(gaussian_epsilon(1.0, 2.0, 1e-5, 2))
    assert epsilon(sampled, "example") < 0.1 * epsilon(shuffled, "example")
    assert any("not proven" in remark for remark in shuffled.remarks)
    whole = SGD | {"sampling": "shuffled", "examples": 8512}
    assert epsilon(found(**whole | {"steps": 133}), "example") == pytest.approx(gaussian_epsilon(1.0, 2.0, 1e-5))
    again = found(**whole | {"steps": 134, "rounds": 3})
    assert epsilon(again, "example") == pytest.approx(gaussian_epsilon(1.0, 2.0, 1e-5, 2))
    assert epsilon(again, "example", all_rounds=True) == pytest.approx(gaussian_epsilon(1.0, 2.0, 1e-5, 6))
    (line,) = (line for line in again.supported if line.unit == "example")
    assert all(e >= line.all_rounds - 0.05 for e in line.accountants.values() if e is not None)


@pytest.mark.parametrize(("neighbors", "change"), [("replace", 2.0), ("add-or-remove", 1.0)])
def test_steps_on_all_of_the_data_are_plain_noise(neighbors: str, change: float):
    all_of_it = SGD | {"batch_size": 8551, "steps": 9, "neighbors": neighbors, "noise_multiplier": 20.0}
    assert epsilon(found(**all_of_it), "example") == pytest.approx(gaussian_epsilon(20.0, change, 1e-5, 9))


def test_sampled_training_takes_the_smallest_of_its_accountants():
    (line,) = (line for line in found(**SGD | {"rounds": 3}).supported if line.unit == "example")
    assert line.accountants == sampled_epsilons(1.0, 64 / 8551, 402, 1e-5)
    assert line.all_rounds == min(value for value in line.accountants.values() if value is not None)
    assert line.one_round < line.all_rounds < 3 * line.one_round


def test_a_client_under_sampled_training_may_have_all_its_examples_in_a_step():
    assert epsilon(found(**SGD), "client") == pytest.approx(gaussian_epsilon(1.0, 8551.0, 1e-5, 134))
    assert epsilon(found(**SGD | {"sampling": "shuffled"}), "client") == pytest.approx(
        gaussian_epsilon(1.0, 128.0, 1e-5, 134)
    )


LAPLACE: dict[str, Any] = {
    "name": "l",
    "mechanism": "laplace",
    "bound": 0.5,
    "coordinates": 3,
    "noise_scale": 0.1,
    "examples": 3,
}


def test_epsilons_of_a_few_values_add_up():
    few = found(**LAPLACE | {"rounds": 2})
    assert epsilon(few, "client") == pytest.approx(2 * 0.5 * 3 / 0.1, rel=0.03)
    assert epsilon(few, "example", all_rounds=True) == pytest.approx(60.0, rel=0.03)
    there = found(**LAPLACE | {"neighbors": "add-or-remove"})
    assert epsilon(there, "client") == pytest.approx(15.0, rel=0.03)
    assert epsilon(there, "example") == pytest.approx(30.0, rel=0.03)


def test_many_small_values_spend_less_than_their_sum():
    """Against the sum of many privacy losses, which is nearly normal: n e^2 / 2 + z e sqrt(n)."""
    many = found(**LAPLACE | {"coordinates": 1_000_000, "noise_scale": 1000.0})
    normal = 1_000_000 * 1e-6 / 2 + 4.27 * 1e-3 * 1000
    assert normal * 0.8 < epsilon(many, "client") < normal * 1.3 < 1000


def test_choosing_and_sending_are_both_spent():
    vector = {
        "name": "v", "mechanism": "sparse-vector", "coordinates": 21, "share": 0.1, "choosing_epsilon": 0.1,
        "value_epsilon": 20.0, "examples": 3,
    }  # fmt: skip
    assert epsilon(found(**vector), "client") == pytest.approx(0.1 + 3 * 20.0, rel=0.03)
    assert epsilon(found(**vector | {"rounds": 2}), "example", all_rounds=True) == pytest.approx(
        0.2 + 6 * 20.0, rel=0.03
    )


def test_a_delta_that_lets_one_example_out_is_pointed_out():
    assert any("delta" in remark for remark in found(**GAUSSIAN | {"delta": 1e-2}).remarks)
    assert not any("delta" in remark for remark in found(**GAUSSIAN).remarks)


def test_sensitivity_that_does_not_belong_to_the_bound_is_pointed_out():
    said = GAUSSIAN | {"clipped": "update", "unit": "client", "declared_epsilon": 10.0}
    assert any("must agree" in remark for remark in found(**said, declared_sensitivity=1e-4).remarks)
    assert not any("must agree" in remark for remark in found(**said, declared_sensitivity=2.0).remarks)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([{"name": "x", "mechanism": "gausian"}], "did you mean 'gaussian'"),
        ([{"name": "x"}], "mechanism of claim 1"),
        ([GAUSSIAN | {"cliped": 1.0}], "key of claim 'noise' 'cliped'"),
        ([GAUSSIAN | {"noise_std": -1.0}], "claim 'noise': noise_std"),
        ([GAUSSIAN | {"noise_std": float("nan")}], "claim 'noise': noise_std"),
        ([GAUSSIAN | {"clip": None}], "clip is the bound"),
        ([GAUSSIAN | {"clipped": "nothing"}], "clip is the bound"),
        ([GAUSSIAN | {"declared_epsilon": 1.0}], "unit of privacy"),
        ([GAUSSIAN | {"delta": 1.0}], "delta"),
        ([SGD | {"batch_size": 9000}], "more than the 8551 examples"),
        ([SGD | {"neighbors": "replace"}], "added or removed"),
        (["gaussian"], "mechanism of claim 1"),
        ([{"name": "x", "mechanism": ["a"]}], "mechanism of claim 1"),
        ([GAUSSIAN | {"clipped": "tensor"}], "give it with clipped"),
        ([GAUSSIAN | {"tensors": 3}], "give it with clipped"),
        ([SGD | {"steps": 10**400}], "claim 'sgd': steps"),
    ],
)
def test_what_cannot_be_a_claim_is_refused_in_a_sentence(tables: list[Any], said: str):
    with pytest.raises(BadInputError, match=r".") as refused:
        parse_claims(tables)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", ["[[claim", "name = 1", "", "claim = 3", "\xff"])
def test_a_file_that_holds_no_claims_is_bad_input(tmp_path: Path, content: str):
    path = tmp_path / "claims.toml"
    path.write_bytes(content.encode("latin1"))
    result = CliRunner().invoke(app, ["claims", str(path)])
    assert isinstance(result.exception, BadInputError)
    with pytest.raises(BadInputError, match="no file"):
        load_claims(tmp_path / "missing.toml")


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadInputError, match=r"pip install 'gradaudit\[dp\]'"):
        found(**GAUSSIAN)


def test_the_frameworks_own_settings():
    by = {finding.claim.name: finding for finding in map(check, load_claims(STOCK / "frameworks.toml"))}
    flower, careless = by["Flower LocalDpMod(1, 1, 1, 1e-5)"], by["Flower LocalDpMod(1, 1e-4, 10, 1e-5)"]
    assert (flower.verdict, careless.verdict) == ("not supported", "not supported")
    assert flower.holds == pytest.approx(1.61, rel=0.01)
    assert careless.holds == pytest.approx(8.5e8, rel=0.01)
    assert 1e4 < by["NVFlare SVTPrivacy()"].holds < 0.1 * 2_271_322
    assert by["NVFlare PercentilePrivacy()"].verdict == by["NVFlare ExcludeVars"].verdict == "void"


def test_the_command_prints_every_unit_and_ends_with_1_where_a_claim_does_not_hold():
    result = CliRunner().invoke(app, ["claims", str(STOCK / "gaussian.toml")])
    assert result.exit_code == 1
    for part in ("22,179", "168", "one example", "all that a client holds", "not supported", "no guarantee"):
        assert part in result.output, part


def test_json_has_no_infinity_and_a_claim_that_holds_ends_with_0(tmp_path: Path):
    path = tmp_path / "claims.toml"
    path.write_text(
        '[[claim]]\nname = "one [bold]"\nmechanism = "gaussian"\nclipped = "update"\nclip = 1\nnoise_std = 5\n'
        'examples = 1\ndeclared_epsilon = 2\nunit = "client"\n'
    )
    result = CliRunner().invoke(app, ["claims", str(path), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["verdict"] == "supported"
    assert "one [bold]" in CliRunner().invoke(app, ["claims", str(path)]).output
    stock = CliRunner().invoke(app, ["claims", str(STOCK / "frameworks.toml"), "--json"])
    for line in stock.stdout.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_the_page_has_every_key_with_its_meaning():
    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf8")
    for mechanism, model in MODELS.items():
        assert f'### `mechanism = "{mechanism}"`' in text
        for key, field in model.model_fields.items():
            assert key == "mechanism" or (f"| `{key}` |" in text and str(field.description) in text), (mechanism, key)


@pytest.mark.parametrize(
    "values",
    [
        GAUSSIAN | {"noise_std": 1e-300},
        SGD | {"noise_multiplier": 1e-300},
        SGD | {"delta": 1e-18},
        SGD | {"delta": 0.9},
        LAPLACE | {"coordinates": 10**12},
    ],
)
def test_numbers_at_the_ends_of_their_ranges_end_in_a_verdict(values: dict[str, Any]):
    finding = found(**values)
    assert all(line.one_round >= 0 and not math.isnan(line.all_rounds) for line in finding.supported)
    json.dumps(finding.as_json(), allow_nan=False)


def test_a_remark_on_the_classical_formula_comes_above_epsilon_1_only():
    said = GAUSSIAN | {"clipped": "update", "unit": "client", "declared_sensitivity": 2.0}
    assert any("up to 1 only" in r for r in found(**said, declared_epsilon=1.5).remarks)
    assert not any("up to 1 only" in r for r in found(**said, declared_epsilon=0.9).remarks)


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 64 / 8551, 134_000), (0.0973, 1e-6, 1)])
def test_the_numeric_accountants_keep_to_a_grid_that_fits_epsilon(monkeypatch, noise: float, rate: float, steps: int):
    """Opacus' grid of 22 at its default has 8 million points, dp-accounting's of 45 a million: 7 and 11 s."""
    import dp_accounting
    from opacus.accountants import PRVAccountant

    told: list[float] = []
    prv, pld = PRVAccountant.get_epsilon, dp_accounting.pld.PLDAccountant

    def coarse(self, delta, **how):
        told.append(how["eps_error"])
        return prv(self, delta, **how)

    monkeypatch.setattr(PRVAccountant, "get_epsilon", coarse)

    def coarse_grid(**how):
        told.append(how["value_discretization_interval"])
        return pld(**how)

    monkeypatch.setattr(dp_accounting.pld, "PLDAccountant", coarse_grid)
    by = sampled_epsilons(noise, rate, steps, 1e-5)
    rdp = min(by["Opacus, RDP"], by["dp-accounting, RDP"])
    assert told == pytest.approx([0.01 * rdp, 1e-4 * rdp])
