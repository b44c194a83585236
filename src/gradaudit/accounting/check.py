"""The claims check: the epsilon that a declared mechanism really supports, for each unit of privacy."""

import math
from dataclasses import dataclass, field
from typing import Literal

from gradaudit.accounting.claim import (
    Claim,
    DPSGDClaim,
    GaussianClaim,
    LaplaceClaim,
    NoNoiseClaim,
    SparseVectorClaim,
    Unit,
)
from gradaudit.accounting.epsilon import EXACT, gaussian_epsilon, laplace_epsilon, sampled_epsilons

Verdict = Literal["void", "not supported", "supported", "nothing declared"]

_TIMES: dict[str, dict[Unit, float]] = {
    "replace": {"client": 2.0, "example": 2.0},
    "add-or-remove": {"client": 1.0, "example": 2.0},
}
"""Largest change of a limited value, in its bounds: one example that is there or not may turn the sum around."""

LITTLE = 10.0
"""Epsilon above which a remark says what it means: an attacker's odds may change by e to its power."""


@dataclass(frozen=True)
class Supported:
    """What holds for one unit of privacy.

    Args:
        unit: whose data is hidden.
        sensitivity: largest change of what the noise is added to: L2 norm (gaussian), multiples of the clipping bound
            (dp-sgd), L1 norm (laplace); None where the mechanism has no such number.
        one_round: epsilon of one round.
        all_rounds: epsilon of all rounds.
        accountants: epsilon of all rounds by accountant, where several were asked; None: not asked.
    """

    unit: Unit
    sensitivity: float | None
    one_round: float
    all_rounds: float
    accountants: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ClaimCheck:
    """What the check says of one claim.

    Args:
        claim: the claim.
        supported: what holds, a unit each; empty where nothing does.
        void: why there is no guarantee at all.
        remarks: what a reader must know beside it.
    """

    claim: Claim
    supported: tuple[Supported, ...]
    void: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """What the claim is worth; a void one is void whatever was declared."""
        if self.void:
            return "void"
        if self.claim.declared_epsilon is None:
            return "nothing declared"
        return "supported" if self.claim.declared_epsilon >= self.holds * (1 - 1e-9) else "not supported"

    @property
    def holds(self) -> float:
        """Epsilon that holds for the claim's own unit and time; infinite where nothing does."""
        for line in self.supported:
            if line.unit == self.claim.unit:
                return line.one_round if self.claim.declared_for == "round" else line.all_rounds
        return math.inf

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""
        said, when = self.claim.declared_epsilon, "a round" if self.claim.declared_for == "round" else "all rounds"
        match self.verdict:
            case "void":
                return f"no guarantee: {'; '.join(self.void)}"
            case "nothing declared":
                return "no epsilon is declared"
            case told:
                return f"{told}: epsilon {said:g} is declared, {number(self.holds)} holds for {when}"

    def as_json(self) -> dict[str, object]:
        """Return the finding as plain data; an infinite epsilon is null, with the reason under "void"."""
        return {
            "claim": self.claim.model_dump(mode="json"),
            "verdict": self.verdict,
            "sentence": self.sentence,
            "supported": [
                {
                    "unit": line.unit,
                    "sensitivity": line.sensitivity,
                    "epsilon_one_round": _finite(line.one_round),
                    "epsilon_all_rounds": _finite(line.all_rounds),
                    "accountants": {name: _finite(value) for name, value in line.accountants.items()},
                }
                for line in self.supported
            ],
            "void": list(self.void),
            "remarks": list(self.remarks),
        }


def number(value: float) -> str:
    """Return an epsilon with three digits, short for large ones."""
    if value < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")


def check(claim: Claim) -> ClaimCheck:
    """Return the epsilon that a claim's mechanism supports, and why there is none where there is none.

    What attacks recover has no part in it: a mechanism without a guarantee may still stop today's attacks, and an
    epsilon that holds says nothing of how well a model can be attacked within it.

    Args:
        claim: what is declared.

    Raises:
        BadInputError: the extra `dp` is not installed.
    """
    void: list[str] = []
    remarks: list[str] = []
    if claim.unprotected:
        void.append(f"{', '.join(claim.unprotected)} are sent as they are")
    supported: tuple[Supported, ...] = ()
    match claim:
        case GaussianClaim():
            supported = _gaussian(claim, void, remarks)
        case LaplaceClaim():
            supported = _laplace(claim, void)
        case SparseVectorClaim():
            supported = _sparse(claim, remarks)
        case DPSGDClaim():
            supported = _dpsgd(claim, void, remarks)
        case NoNoiseClaim():
            void.append("no noise is added, so what is sent is a function of the data alone")
    if void:
        supported = ()
    if not isinstance(claim, NoNoiseClaim) and claim.delta >= 1 / claim.examples:
        remarks.append(
            f"delta {claim.delta:g} is not below one in {claim.examples:,} examples: publishing one of them whole is "
            "within it"
        )
    finding = ClaimCheck(claim, supported, tuple(void), tuple(remarks))
    if finding.verdict == "supported" and finding.holds > LITTLE:
        value = number(finding.holds)
        more = f"epsilon {value} lets an attacker's odds change by a factor of e^{value}: it promises little"
        return ClaimCheck(claim, supported, (), (*remarks, more))
    return finding


def _gaussian(claim: GaussianClaim, void: list[str], remarks: list[str]) -> tuple[Supported, ...]:
    if claim.clip is None:
        void.append("nothing is clipped, so one sentence can change the update by any amount")
    if claim.noise_std == 0:
        void.append("the noise is zero")
    if claim.clip is None:
        return ()
    times = 2.0 if claim.neighbors == "replace" else 1.0
    bound = claim.clip * math.sqrt(claim.tensors or 1)
    # one example that is there or not may turn a clipped update around, and moves the others' weights in a mean
    changes: dict[Unit, float] = {"client": times * bound, "example": 2 * bound}
    if claim.clipped == "example":
        changes["example"] = 2 * bound / claim.examples
    elif claim.examples > 1:
        remarks.append(
            f"one example's part is not clipped ({claim.clipped} is): it may be the whole update, so one of "
            f"{claim.examples:,} examples has no more than the client's epsilon"
        )
    said = claim.declared_sensitivity
    if said is not None and claim.unit is not None and said < changes[claim.unit] * (1 - 1e-9):
        remarks.append(
            f"the noise was computed for a sensitivity of {said:g}, and it is {changes[claim.unit]:g} (bound "
            f"{claim.clip:g}, {claim.neighbors}): clipping and sensitivity must agree"
        )
    if said is not None and (claim.declared_epsilon or 0) > 1:
        remarks.append("sqrt(2 ln(1.25 / delta)) sensitivity / epsilon is proven for epsilon up to 1 only")
    return tuple(
        Supported(
            unit,
            change,
            gaussian_epsilon(claim.noise_std, change, claim.delta),
            gaussian_epsilon(claim.noise_std, change, claim.delta, claim.rounds),
        )
        for unit, change in changes.items()
    )


def _laplace(claim: LaplaceClaim, void: list[str]) -> tuple[Supported, ...]:
    if claim.bound is None:
        void.append("no coordinate is limited, so one sentence can change the update by any amount")
    if claim.noise_scale == 0:
        void.append("the noise is zero")
    if void or claim.bound is None:
        return ()
    lines = []
    for unit, times in _TIMES[claim.neighbors].items():
        change = times * claim.bound
        one, all_ = (
            laplace_epsilon(claim.noise_scale / change, claim.coordinates * n, claim.delta) for n in (1, claim.rounds)
        )
        lines.append(Supported(unit, change * claim.coordinates, one, all_))
    return tuple(lines)


def _sparse(claim: SparseVectorClaim, remarks: list[str]) -> tuple[Supported, ...]:
    sent = math.ceil(claim.share * claim.coordinates)
    remarks.append(
        f"{sent:,} values are sent, each of which spends {claim.value_epsilon:g}; that choosing them spends "
        f"{claim.choosing_epsilon:g} in all is taken as declared, for the whole update replaced"
    )
    one, all_ = (
        n * claim.choosing_epsilon + laplace_epsilon(1 / claim.value_epsilon, sent * n, claim.delta)
        for n in (1, claim.rounds)
    )
    units: tuple[Unit, ...] = ("client", "example")
    return tuple(Supported(unit, None, one, all_) for unit in units)


def _dpsgd(claim: DPSGDClaim, void: list[str], remarks: list[str]) -> tuple[Supported, ...]:
    if claim.noise_multiplier == 0:
        void.append("the noise is zero")
        return ()
    rate, everything = claim.batch_size / claim.examples, claim.batch_size == claim.examples
    sampled = claim.sampling == "poisson" and not everything
    # in batches of a fixed size another takes the place of an example that is left out
    times = 1.0 if claim.neighbors == "add-or-remove" and (sampled or everything) else 2.0
    # by chance all of a client's examples may fall into one step
    most = times * (claim.examples if sampled else claim.batch_size)
    steps = (claim.steps, claim.steps * claim.rounds)
    client = Supported("client", most, _repeated(claim, most, steps[0]), _repeated(claim, most, steps[1]))
    if sampled:
        by = {n: sampled_epsilons(claim.noise_multiplier, rate, n, claim.delta) for n in dict.fromkeys(steps)}
        one, all_ = (by[n] for n in steps)
        example = Supported("example", 1.0, _least(one), _least(all_), all_)
    else:
        # an example is in one batch of each pass over the data at most; a last batch that is not full may be left
        # out, and a round may begin a pass anew
        once = math.ceil(claim.steps / (claim.examples // claim.batch_size))
        passes = [once, once * claim.rounds]
        if not everything:
            remarks.append(
                "batches are cut from shuffled data: no gain by sampling is counted; accounting it as Poisson sampling "
                f"at rate {rate:.3g}, as is often done, is not proven"
            )
        exact = [_repeated(claim, times, n) for n in passes]
        found = sampled_epsilons(claim.noise_multiplier / times, 1.0, passes[1], claim.delta)
        example = Supported("example", times, exact[0], exact[1], found | {EXACT: exact[1]})
    return (client, example)


def _repeated(claim: DPSGDClaim, change: float, times: int) -> float:
    return gaussian_epsilon(claim.noise_multiplier, change, claim.delta, times)


def _least(found: dict[str, float | None]) -> float:
    return min(value for value in found.values() if value is not None)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
