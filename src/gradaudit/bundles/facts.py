"""What a command line tells of a training between two checkpoints, and what the bundle then says of itself."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from gradaudit import files
from gradaudit.bundles.bundle import TENSORS, read_knowledge, read_manifest
from gradaudit.bundles.model import MODEL
from gradaudit.case import parse_value
from gradaudit.errors import BadInputError, unknown_name
from gradaudit.types import LocalTraining

_AGREE = 0.25
"""Of rows that only shrank, the middle deviation from the middle one, as a share of it, is below this."""
_HALF = 2.0**-25
"""Half the distance of the float32 numbers just below 1."""


def facts(
    dropout: str | None, optimizer: str | None, rate: float | None, more: Sequence[str], defense: Sequence[str]
) -> dict[str, Any]:
    """Return what options say, as `gradaudit.bundle` takes it; what is not said is None.

    Args:
        dropout: "on", "off" or a rate.
        optimizer: of the local steps.
        rate: its learning rate.
        more: "field=value" of other fields of the training.
        defense: names, or TOML tables with a name; "none" says that there was none.

    Raises:
        BadInputError: another word, or a training that is told in part.
    """
    return {
        "dropout": _dropout(dropout),
        "training": _training(optimizer, rate, more),
        "defenses": _defenses(defense),
    }


def _dropout(said: str | None) -> bool | float | None:
    if said is None or said in ("on", "off"):
        return None if said is None else said == "on"
    try:
        return float(said)
    except ValueError:
        raise BadInputError(f"--dropout takes on, off or a rate, got '{said}'") from None


def _training(optimizer: str | None, rate: float | None, more: Sequence[str]) -> LocalTraining | None:
    if optimizer is None and rate is None and not more:
        return None
    if optimizer is None or rate is None:
        raise BadInputError("a training is told by --optimizer and --learning-rate, both; leave both away if unknown")
    values: dict[str, Any] = {"optimizer": optimizer, "learning_rate": rate}
    for setting in more:
        key, equals, text = setting.partition("=")
        if not equals:
            raise BadInputError(f"--set takes field=value, for example weight_decay=0.01; got '{setting}'")
        if key.strip() not in LocalTraining.__dataclass_fields__:
            raise unknown_name("field of the training", key.strip(), LocalTraining.__dataclass_fields__)
        values[key.strip()] = parse_value(text)
    if optimizer == "none":
        raise BadInputError("two checkpoints differ by steps of an optimizer: --optimizer sgd, adam or adamw")
    try:
        return TypeAdapter(LocalTraining).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInputError(f"{first['loc'][0]}: {first['msg']}, got {first['input']!r}") from None


def _defenses(said: Sequence[str]) -> list[dict[str, Any]] | None:
    if not said:
        return None
    if list(said) == ["none"]:
        return []
    read = [parse_value(one) for one in said]
    return [one if isinstance(one, dict) else {"name": str(one)} for one in read]


def remarks(folder: Path) -> list[str]:
    """Return what to know of a bundle that was made of checkpoints: what is unknown, and what its change looks like.

    Args:
        folder: the bundle.
    """
    manifest = read_manifest(folder)
    known = manifest.knowledge
    names = {"training": "optimizer and learning rate", "batch_size": "sentences", "dropout": "dropout"}
    unknown = [said for name, said in names.items() if known.get(name) is None]
    found = []
    if unknown:
        found.append(f"the attacker is not told: {', '.join(unknown)}")
    if all(_fits_bfloat16(path) for path in (folder / MODEL).glob("*.safetensors")):
        found.append("all weights fit in bfloat16: what changed by less than its rounding is not in the update")
    told = read_knowledge(known).training
    if told is None:
        return found
    steps = told.steps(known.get("batch_size") or 1)
    rate = told.mean_rate(steps) * steps
    decay = _decay(folder, rate)
    if decay is not None and abs(decay - told.weight_decay) > 0.1 * decay + _HALF / rate:
        # one minus rate times decay was rounded: of what gives the same, the roundest
        rounded = (float(f"{decay:.{digits}g}") for digits in (1, 2, 3))
        likely = next((value for value in rounded if abs(value - decay) * rate <= _HALF), decay)
        found.append(
            f"words that were not trained on shrank as by a weight decay of {likely:g}, and {told.weight_decay:g} was "
            f"told: --set weight_decay={likely:g} lets the attack read more"
        )
    return found


def _decay(folder: Path, rate: float) -> float | None:
    """Return the weight decay that most rows of the word embedding show; None where they do not agree.

    Args:
        folder: the bundle.
        rate: the sum of all steps' learning rates.
    """
    config = json.loads((folder / MODEL / "config.json").read_text(encoding="utf8"))
    with files.stored_tensors(folder / TENSORS) as file:
        name = next((n for n, s in file.shapes.items() if len(s) == 2 and s[0] == config.get("vocab_size")), None)
        if name is None:
            return None
        change = file.read([name])[name].double()
    for path in (folder / MODEL).glob("*.safetensors"):
        with files.stored_tensors(path) as file:
            if name in file.shapes:
                weight = file.read([name])[name].double()
                break
    else:
        return None
    kept = weight.square().sum(1) > 0
    shrunk = -(change * weight).sum(1)[kept] / weight.square().sum(1)[kept]
    middle = float(shrunk.median())
    apart = float((shrunk - middle).abs().median())
    return middle / rate if apart <= _AGREE * abs(middle) else None


def _fits_bfloat16(path: Path) -> bool:
    with files.stored_tensors(path) as file:
        return all(
            torch.equal(value, value.bfloat16().to(value.dtype))
            for name in file.shapes
            for value in file.read([name]).values()
            if value.is_floating_point()
        )
