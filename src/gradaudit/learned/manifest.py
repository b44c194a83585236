"""An inverter on disk: a manifest of plain values beside tensors, for text and for images."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.files import read_manifest, replacing, stored_tensors
from gradaudit.learned.scaling import Scaling
from gradaudit.learned.text.word_pairs import PAIRS, WordPairs, save_pairs
from gradaudit.models.spec import Loss, Task
from gradaudit.types import Observation, UpdateKind

P = TypeVar("P", bound="Plain")
MANIFEST, WEIGHTS = "manifest.json", "inverter.safetensors"


class Plain(BaseModel):
    """Data of a manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Target(Plain):
    """What an inverter is made for: an update of anything else is refused.

    Args:
        title: the model's name, for messages.
        fingerprint: sha256 of its weights.
        task: its task.
        kind: "gradient" or "delta".
        tensors: shapes of what is seen, by view name, in the order in which they are hashed.
        batch_size: sentences an update.
        defenses: the client's, in order.
        training: its optimizer, learning rate, epochs and minibatch.
        dropout: rate in force, 0 for none.
        loss: that it trains with; None in inverters of before.
        replayed: what else decides what the client sends, and an update does not tell: how many clients share it, on
            which side is padded, dropout's rate where it is overridden, which parameters are trained.
    """

    title: str
    fingerprint: str
    task: Task
    kind: UpdateKind
    tensors: dict[str, tuple[int, ...]]
    batch_size: int = Field(ge=1, le=4096)
    defenses: tuple[dict[str, Any], ...]
    training: dict[str, Any]
    dropout: float
    loss: Loss | None = None
    replayed: dict[str, Any] = {}


def refuse_misfit(target: Target, seen: Observation[Any]) -> None:
    """Check that an update is what an inverter is made for; what the attacker was not told is taken to be so.

    Raises:
        NotSupportedError: one sentence on the first thing that differs.
    """
    if seen.model.fingerprint() != target.fingerprint:
        raise NotSupportedError(
            f"the inverter is made for other weights ({target.title}, {target.fingerprint[:12]}; this model has "
            f"{seen.model.fingerprint()[:12]}): fit one for this model"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in seen.tensors.items()}
    if set(shapes) != set(target.tensors):
        odd = sorted(set(shapes) ^ set(target.tensors))[0]
        where = "the inverter was not made with it" if odd in shapes else "the update does not hold it"
        raise NotSupportedError(f"the inverter is made for another selection of tensors ('{odd}': {where})")
    for name, shape in shapes.items():
        if shape != tuple(target.tensors[name]):
            made = list(target.tensors[name])
            raise NotSupportedError(f"the inverter is made for '{name}' of shape {made}, not {list(shape)}")
    if target.loss is not None and seen.model.spec.loss != target.loss:
        raise NotSupportedError(f"the inverter is made for the loss {target.loss}, not for {seen.model.spec.loss}")
    if seen.kind != target.kind:
        raise NotSupportedError(f"the inverter is made for a {target.kind}, not for a {seen.kind}")
    known = seen.knowledge
    told = {
        "batch_size": known.batch_size,
        "defenses": known.defenses,
        "training": None if known.training is None else known.training.described(),
        "dropout": known.dropout,
    }
    for name, value in told.items():
        mine = getattr(target, name)
        if value is not None and _plain(value) != _plain(mine):
            raise NotSupportedError(
                f"the inverter is made for a client with {name.replace('_', ' ')} {_said(mine)}, not {_said(value)}: "
                "fit one through this client"
            )


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=dict))


def _said(value: Any) -> str:
    plain = _plain(value)
    if isinstance(plain, list):
        return ", ".join(" ".join(str(v) for v in one.values()) for one in plain) or "none"
    return str(plain)


def write_inverter(
    folder: Path, manifest: Plain, weights: Mapping[str, Tensor], scaling: Scaling, pairs: WordPairs | None = None
) -> Path:
    """Write a manifest, what was learned and its scaling; the manifest comes last, so that a folder with one is whole.

    Raises:
        BadInputError: the folder cannot be written.
    """
    tensors = {n: p.detach().cpu().contiguous() for n, p in weights.items()}
    tensors |= {"mean": scaling.mean.cpu(), "deviation": scaling.deviation.cpu()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS)
        if pairs is not None:
            save_pairs(folder, pairs)
        with replacing(folder / MANIFEST) as fresh:
            fresh.write_text(manifest.model_dump_json(indent=1), encoding="utf8")
    except (OSError, SafetensorError) as error:
        raise BadInputError(
            f"cannot write the inverter {folder} ({error}); make room or choose another folder"
        ) from None
    return folder


def digest_of_inverter(folder: Path) -> str | None:
    """Return the sha256 of all files that decide what an inverter reads; None where there is none."""
    if not (folder / WEIGHTS).is_file():
        return None
    digest = hashlib.sha256()
    for name in (WEIGHTS, MANIFEST, PAIRS):
        if (folder / name).is_file():
            with open(folder / name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_manifest_of(folder: Path, kind: type[P]) -> P:
    """Return the manifest of an inverter.

    Args:
        folder: of the inverter.
        kind: of manifest.

    Raises:
        BadInputError: no such folder, or nothing in it that is one.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise BadInputError(f"{folder} is not an inverter: it has no {MANIFEST} (see 'gradaudit fit')")
    return read_manifest(path, kind, "the manifest of such an inverter")


def read_tensors(
    folder: Path, network: Mapping[str, tuple[int, ...]], inputs: int
) -> tuple[dict[str, Tensor], Scaling]:
    """Return the weights of an inverter's network and the scaling of its inputs.

    Args:
        folder: of the inverter.
        network: shapes of its weights, which the file's header must have.
        inputs: of the network.

    Raises:
        BadInputError: the file is missing, truncated, or holds something else.
    """
    path = folder / WEIGHTS
    wanted = dict(network) | {"mean": (inputs,), "deviation": (inputs,)}
    with stored_tensors(path) as file:
        if file.shapes != wanted or set(file.dtypes.values()) != {"F32"}:
            raise BadInputError(f"{path} does not hold the network that {MANIFEST} describes; it is damaged")
        tensors = file.read((name for name in wanted if name != "deviation"), finite=True)
        deviation = file.read(["deviation"])["deviation"]
    return tensors, Scaling(tensors.pop("mean"), deviation)
