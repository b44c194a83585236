"""A claim: what somebody says of a mechanism that protects the updates, as a [[claim]] table."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from gradaudit.errors import BadInputError, unknown_name
from gradaudit.files import read_toml

Unit = Literal["client", "example"]
"""Whose data the guarantee hides: all that one client holds, or one of its examples."""


class _Claim(BaseModel):
    """What every mechanism's claim says."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(min_length=1, description="what the table calls it")
    rounds: int = Field(default=1, ge=1, le=10**9, description="rounds in which the same data is used")
    delta: float = Field(default=1e-5, gt=0, lt=1, description="failure probability")
    neighbors: Literal["replace", "add-or-remove"] = Field(
        default="replace", description="what may differ: the unit's data is another's, or is there or not"
    )
    declared_epsilon: float | None = Field(default=None, ge=0, description="epsilon that is claimed, if one is")
    declared_for: Literal["round", "training"] = Field(default="training", description="what it is claimed for")
    unit: Unit | None = Field(default=None, description="whose data the claim is said to hide")
    unprotected: tuple[str, ...] = Field(default=(), description="what is sent beside it as it is (buffers, counts)")
    source: str = Field(default="", description="where the settings come from")

    @model_validator(mode="after")
    def _unit_of_claim(self) -> Self:
        if self.declared_epsilon is not None and self.unit is None:
            raise ValueError('a declared epsilon needs its unit of privacy: unit = "client" or "example"')
        return self


class _OfExamples(_Claim):
    examples: int = Field(ge=1, le=10**15, description="examples that one client trains on in a round")


class GaussianClaim(_OfExamples):
    """Gaussian noise on what a client sends."""

    mechanism: Literal["gaussian"]
    clipped: Literal["example", "update", "tensor", "nothing"] = Field(
        description="what is clipped in L2 norm: each example's part (the update being their mean), the whole update, "
        "each of its tensors, or nothing; scaling to a fixed norm counts as clipping"
    )
    clip: float | None = Field(default=None, gt=0, description="the bound; none where nothing is clipped")
    tensors: int | None = Field(
        default=None, ge=1, le=10**9, description='how many tensors are clipped, where clipped = "tensor"'
    )
    noise_std: float = Field(ge=0, description="standard deviation of the noise on what is sent")
    declared_sensitivity: float | None = Field(
        default=None, ge=0, description="sensitivity from which the noise was computed, if it was"
    )

    @model_validator(mode="after")
    def _bound_where_clipped(self) -> Self:
        if (self.clip is None) != (self.clipped == "nothing"):
            raise ValueError('clip is the bound of what is clipped: give both, or clipped = "nothing" and no clip')
        if (self.tensors is None) != (self.clipped != "tensor"):
            raise ValueError('tensors says how many are clipped each by itself: give it with clipped = "tensor" alone')
        return self


class LaplaceClaim(_OfExamples):
    """Laplace noise on every coordinate of what a client sends, each limited to an interval."""

    mechanism: Literal["laplace"]
    bound: float | None = Field(gt=0, description="largest magnitude of a coordinate")
    coordinates: int = Field(ge=1, le=10**15, description="how many are sent")
    noise_scale: float = Field(ge=0, description="scale b of the noise")


class SparseVectorClaim(_OfExamples):
    """A share of the coordinates, chosen by the sparse vector technique and sent with Laplace noise."""

    mechanism: Literal["sparse-vector"]
    coordinates: int = Field(ge=1, le=10**15, description="coordinates of the model")
    share: float = Field(gt=0, le=1, description="share of them that is sent")
    choosing_epsilon: float = Field(gt=0, description="budget of choosing all of them")
    value_epsilon: float = Field(gt=0, description="budget of each value that is sent")


class DPSGDClaim(_OfExamples):
    """DP-SGD: each example's gradient clipped, noise on the sum of a step's batch."""

    mechanism: Literal["dp-sgd"]
    neighbors: Literal["replace", "add-or-remove"] = Field(
        default="add-or-remove", description="accountants of sampled noise take one example added or removed"
    )
    noise_multiplier: float = Field(ge=0, description="standard deviation of the noise over the clipping bound")
    batch_size: int = Field(ge=1, le=10**15, description="examples a step, in the mean")
    steps: int = Field(ge=1, le=10**9, description="steps a round")
    sampling: Literal["poisson", "shuffled"] = Field(
        description="each example enters a step by chance, or the data is shuffled and cut into batches"
    )

    @model_validator(mode="after")
    def _accountable(self) -> Self:
        if self.batch_size > self.examples:
            raise ValueError(f"batch_size {self.batch_size} is more than the {self.examples} examples there are")
        if self.sampling == "poisson" and self.batch_size < self.examples and self.neighbors == "replace":
            raise ValueError('sampled noise is accounted for one example added or removed: neighbors = "add-or-remove"')
        return self


class NoNoiseClaim(_Claim):
    """Anything that adds no noise: pruning, signs, rounding, clipping alone, a share of the coordinates."""

    mechanism: Literal["none"]


Claim = Annotated[
    GaussianClaim | LaplaceClaim | SparseVectorClaim | DPSGDClaim | NoNoiseClaim, Field(discriminator="mechanism")
]
MODELS: dict[str, type[BaseModel]] = {
    "gaussian": GaussianClaim, "laplace": LaplaceClaim, "sparse-vector": SparseVectorClaim, "dp-sgd": DPSGDClaim,
    "none": NoNoiseClaim,
}  # fmt: skip
_claims = TypeAdapter(list[Claim])


def load_claims(path: Path) -> list[Claim]:
    """Return the claims of a TOML file.

    Args:
        path: a file of [[claim]] tables.

    Raises:
        BadInputError: one sentence for the first thing wrong.
    """
    if not path.exists():
        raise BadInputError(f"no file '{path}'; it should hold [[claim]] tables, see docs/claims.md")
    data = read_toml(path)
    tables = data.pop("claim", None)
    if data:
        raise unknown_name(f"key of '{path}'", next(iter(data)), ["claim"])
    if not isinstance(tables, list) or not tables:
        raise BadInputError(f"'{path}' has no [[claim]] table; see docs/claims.md")
    return parse_claims(tables)


def parse_claims(tables: list[Any]) -> list[Claim]:
    """Return the claims of parsed tables.

    Raises:
        BadInputError: one sentence for the first thing wrong.
    """
    for place, table in enumerate(tables, 1):
        mechanism = table.get("mechanism") if isinstance(table, dict) else None
        if not isinstance(mechanism, str) or mechanism not in MODELS:
            raise unknown_name(f"mechanism of claim {place}", str(mechanism), MODELS)
    try:
        return _claims.validate_python(tables)
    except ValidationError as error:
        first = error.errors()[0]
        index, _, *where = first["loc"]
        table = tables[int(index)]
        title = f"claim '{table.get('name') or int(index) + 1}'"
        if first["type"] == "extra_forbidden":
            raise unknown_name(f"key of {title}", str(where[0]), MODELS[table["mechanism"]].model_fields) from None
        key = ".".join(str(part) for part in where)
        said = first["msg"].removeprefix("Value error, ")
        got = f", got {first['input']!r}" if key and first["type"] != "missing" else ""
        raise BadInputError(f"{title}: {key + ': ' if key else ''}{said}{got}") from None
