"""The privacy mechanism that an update went through, as a bundle says it and as a claim is checked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gradaudit.accounting.claim import Claim, parse_claims
from gradaudit.case import parse_value
from gradaudit.errors import BadInputError


class Mechanism(BaseModel):
    """DP-SGD as Opacus' optimizer has it.

    Args:
        mechanism: its kind, as in claims.
        clip: bound on the L2 norm of one example's gradient.
        noise_multiplier: standard deviation of the noise on the sum over the bound.
        batch_size: examples a step, in the mean: by it the sum is divided. None where it is not divided.
        steps: that this update is made of.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    mechanism: Literal["dp-sgd"] = "dp-sgd"
    clip: float = Field(gt=0)
    noise_multiplier: float = Field(ge=0)
    batch_size: int | None = Field(default=None, ge=1)
    steps: int = Field(default=1, ge=1)

    def defense(self) -> dict[str, Any]:
        """Return it as attacks are told of it."""
        return {"name": "dp-sgd", "clip": self.clip, "noise_multiplier": self.noise_multiplier}


def read_mechanism(optimizer: Any, steps: int) -> Mechanism:
    """Return the mechanism of an optimizer that Opacus made private.

    Args:
        optimizer: a DPOptimizer.
        steps: that it took.

    Raises:
        BadInputError: another optimizer, or one whose bound or noise is not one number.
    """
    clip, noise = getattr(optimizer, "max_grad_norm", None), getattr(optimizer, "noise_multiplier", None)
    if not isinstance(clip, int | float) or not isinstance(noise, int | float):
        raise BadInputError(
            f"capture reads the mechanism of Opacus' DPOptimizer with one bound and one noise, not of "
            f"{type(optimizer).__name__}"
        )
    size = optimizer.expected_batch_size if optimizer.loss_reduction == "mean" else None
    return Mechanism(
        clip=float(clip), noise_multiplier=float(noise), batch_size=None if size is None else int(size), steps=steps
    )


def claim_of(folder: Path, mechanism: Mechanism | None, settings: Sequence[str]) -> Claim:
    """Return the claim that a bundle's mechanism can be checked as.

    Args:
        folder: the bundle, for its name.
        mechanism: as its manifest says; None for none.
        settings: "key=value" of what no optimizer knows: examples, sampling, rounds, delta, declared_epsilon, unit.

    Raises:
        BadInputError: no mechanism, or keys of the claim that are missing or wrong.
    """
    if mechanism is None:
        raise BadInputError(
            f"{folder} names no mechanism: capture(..., optimizer=...) with Opacus' optimizer writes it, or write a "
            "file of claims (docs/claims.md)"
        )
    table: dict[str, Any] = {"name": folder.name or "bundle"} | mechanism.model_dump(
        exclude={"clip"}, exclude_none=True
    )
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise BadInputError(f"--set takes key=value, for example examples=8551; got '{setting}'")
        table[key.strip()] = parse_value(text)
    asked = [key for key in ("examples", "sampling", "batch_size") if key not in table]
    if asked:
        more = " ".join(f"--set {key}={example}" for key, example in _EXAMPLES.items() if key in asked)
        raise BadInputError(f"an optimizer does not know all that decides epsilon; say {more}")
    return parse_claims([table])[0]


_EXAMPLES = {"examples": "8551", "sampling": "poisson", "batch_size": "16"}
"""What is asked for, with an example."""
