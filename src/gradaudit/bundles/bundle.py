"""An update on disk: `update.safetensors` and `manifest.json` in one folder, and the checks before it is attacked.

A bundle comes from elsewhere and is not trusted: nothing in it is run or unpickled, only files of fixed names inside
its own folder are read, and no more memory is taken than its model has parameters.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import gradaudit
from gradaudit import files
from gradaudit.bundles.checkpoints import refuse_checkpoints
from gradaudit.bundles.mechanism import Mechanism
from gradaudit.bundles.model import ModelEntry, load_bundle_model
from gradaudit.errors import AuditError, BadInputError, NotSupportedError
from gradaudit.models.base import Model
from gradaudit.models.images import ImageModel
from gradaudit.models.transformers import TransformersModel
from gradaudit.models.zoo import whole_shapes
from gradaudit.registry import build, describe
from gradaudit.selection import Selection
from gradaudit.types import Knowledge, LocalTraining, Observation, Update, UpdateKind

MANIFEST, TENSORS = "manifest.json", "update.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
MOST_EXAMPLES = 4096
"""Of a batch that a manifest may name: attacks make room for each before they look at the update."""


MOST_STEPS = 100_000
"""Of a training that a manifest may name: attacks replay them one by one."""


class BundleManifest(BaseModel):
    """`manifest.json`: what the tensors are, how they were made, and what an attacker is given beside them."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal[1] = 1
    program: str
    made: str
    model: ModelEntry
    kind: UpdateKind
    knowledge: dict[str, Any]
    mechanism: Mechanism | None = None
    tensors: dict[str, tuple[int, ...]]
    sha256: str


@dataclass(frozen=True)
class Remark:
    """One thing that preflight noticed: an "error" stops the attack, a "warning" is printed."""

    level: Literal["error", "warning"]
    text: str


@dataclass(frozen=True)
class Bundle:
    """A checked bundle: its manifest, model and tensors."""

    manifest: BundleManifest
    model: TransformersModel | ImageModel
    tensors: dict[str, Tensor]
    findings: tuple[Remark, ...]

    def observation(self, selection: Selection) -> Observation[Model]:
        """Return what an attack may see of it."""
        tensors, views = selection.take(self.model, self.tensors)
        known = read_knowledge(self.manifest.knowledge)
        classes = self.model.spec.labels
        longest = max(known.longest or 0, *(known.lengths or (0,)))
        if isinstance(self.model, TransformersModel) and longest > self.model.max_length:
            raise BadInputError(
                f"the manifest's knowledge is not understood (lengths are at most {self.model.max_length} here)"
            )
        if known.labels is not None and any(label >= classes for label in known.labels):
            raise BadInputError(f"the manifest's knowledge is not understood (labels must be below {classes})")
        return Observation(
            model=self.model,
            tensors=tensors,
            views=views,
            kind=self.manifest.kind,
            knowledge=known,
            selection=selection.expression,
        )


def save_bundle(
    folder: Path,
    model: Model,
    update: Update,
    knowledge: Knowledge,
    *,
    inside: bool = False,
    fingerprint: str | None = None,
    mechanism: Mechanism | None = None,
) -> Path:
    """Write an update into a folder and return it.

    Args:
        folder: made when it is not there; a bundle already in it is replaced.
        model: the model the update belongs to.
        update: what left the client.
        knowledge: what an attacker is given.
        inside: the weights are in the bundle's own folder "model" (see `gradaudit.capture`).
        fingerprint: of the weights before the step; the model's present ones when None.
        mechanism: that made it private; None for none, or one that is not known.

    Raises:
        BadInputError: the folder cannot be written (no space, no permission).
        NotSupportedError: a model with adapters that is not inside.
    """
    spec = model.spec
    if spec.lora is not None and not inside:
        raise NotSupportedError("a bundle of adapters holds its model: use capture, or audit LoRA with a case file")
    tensors = {name: t.detach().cpu().contiguous() for name, t in update.tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in (TENSORS, MANIFEST):  # as private as the batch
            (folder / name).touch(mode=0o600)
            (folder / name).chmod(0o600)
        save_file(tensors, folder / TENSORS)
        manifest = BundleManifest(
            program=gradaudit.__version__,
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            model=ModelEntry(
                name=spec.name,
                task=spec.task,
                labels=spec.labels,
                loss=spec.loss,
                seed=spec.seed,
                layers=spec.layers,
                image=spec.image,
                inside=inside,
                adapters=spec.lora is not None,
                fingerprint=fingerprint or model.fingerprint(),
            ),
            kind=update.kind,
            mechanism=mechanism,
            knowledge=json.loads(json.dumps(asdict(knowledge))),
            tensors={name: tuple(t.shape) for name, t in tensors.items()},
            sha256=_sha256(folder / TENSORS),
        )
        (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf8")
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"cannot write the bundle {folder} ({error}); make room or choose another folder") from None
    return folder


def load_bundle(
    folder: Path, device: torch.device | None = None, model: str | None = None, blocks: int | None = None
) -> Bundle:
    """Read a bundle, load its model and check that the two fit, before any attack starts.

    Args:
        folder: the bundle.
        device: where model and tensors go; the CPU when None.
        model: a model name to use in place of the one the manifest names; its weights must be the same.
        blocks: read only so many first blocks of the model, and of the update what belongs to them: a large model then
            needs a fraction of its memory, and its weights cannot be checked against the manifest.

    Raises:
        BadInputError: not a bundle, truncated or foreign files, another model, or an error of `preflight`.
    """
    manifest = read_manifest(folder)
    shapes = _read_header(folder / TENSORS)
    if shapes != {name: tuple(shape) for name, shape in manifest.tensors.items()}:
        raise BadInputError(
            f"{folder / TENSORS} does not hold the tensors that {MANIFEST} lists; the bundle is damaged"
        )
    loaded = load_bundle_model(folder, manifest.model, (folder / TENSORS).stat().st_size, device, model, blocks)
    if blocks is not None:
        _refuse(folder, _misfits(whole_shapes(loaded.spec), shapes))
        here = loaded.parameters()
        shapes = {name: shape for name, shape in shapes.items() if name in here}
    elif loaded.fingerprint() != manifest.model.fingerprint:
        raise BadInputError(
            f"the bundle names another model: it was made with weights {manifest.model.fingerprint[:12]}, and "
            f"'{model or manifest.model.name}' has {loaded.fingerprint()[:12]}"
        )
    _refuse(folder, fit(loaded, shapes))
    if _sha256(folder / TENSORS) != manifest.sha256:
        raise BadInputError(f"{folder / TENSORS} is not the file that {MANIFEST} describes (sha256 differs)")
    with files.stored_tensors(folder / TENSORS) as file:
        tensors = {name: tensor.to(device or "cpu") for name, tensor in file.read(shapes).items()}
    findings = preflight(loaded, tensors)
    if blocks is not None:
        text = f"only {blocks} blocks of the model were loaded: its weights were not checked against the bundle's"
        findings.append(Remark("warning", text))
    _refuse(folder, findings)
    return Bundle(manifest, loaded, tensors, tuple(findings))


def read_manifest(folder: Path) -> BundleManifest:
    """Return the manifest of a bundle folder.

    Raises:
        BadInputError: no such folder, no manifest, or one that cannot be read.
    """
    refuse_checkpoints([folder])
    if folder.is_file():
        raise BadInputError(f"{folder} is a file; name the folder of a bundle (see gradaudit.capture)")
    if not folder.is_dir():
        raise BadInputError(f"no such bundle folder: {folder}; gradaudit.capture and 'gradaudit bundle' make one")
    path = folder / MANIFEST
    if not path.is_file():
        raise BadInputError(f"{folder} is not an update bundle: it has no {MANIFEST} (see gradaudit.capture)")
    return files.read_manifest(path, BundleManifest, "a manifest")


def fit(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> list[Remark]:
    """Return what does not fit between an update's tensors and a model, by names and shapes alone.

    Args:
        model: the model.
        shapes: of the update's tensors by name.
    """
    if not shapes:
        return [Remark("error", "the update holds no tensors")]
    parameters = {name: tuple(p.shape) for name, p in model.parameters().items()}
    findings = _misfits(parameters, shapes)
    missing = sorted(set(parameters) - set(shapes))
    if missing:
        findings.append(
            Remark(
                "warning",
                f"{len(missing)} of {len(parameters)} parameters are not in the update (frozen or not shared), "
                f"the first is '{missing[0]}'",
            )
        )
    return findings


def _misfits(parameters: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> list[Remark]:
    findings = []
    extra = sorted(set(shapes) - set(parameters))
    if extra:
        findings.append(Remark("error", f"{len(extra)} tensors are not of this model, the first is '{extra[0]}'"))
    for name, shape in shapes.items():
        if name in parameters and parameters[name] != tuple(shape):
            told = f"'{name}' has shape {list(shape)}, the model's is {list(parameters[name])}"
            findings.append(Remark("error", told))
    return findings


def preflight(model: Model, tensors: Mapping[str, Tensor]) -> list[Remark]:
    """Return everything about an update that does not fit its model or cannot be attacked.

    Args:
        model: the model the update is said to belong to.
        tensors: the update by parameter name.
    """
    findings = fit(model, {name: tuple(t.shape) for name, t in tensors.items()})
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            findings.append(Remark("error", f"'{name}' has dtype {tensor.dtype}; an update is made of floats"))
        elif not bool(torch.isfinite(tensor).all()):
            findings.append(Remark("error", f"'{name}' holds NaN or infinite values"))
    if tensors and not any(f.level == "error" for f in findings):
        norm = sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors.values()) ** 0.5
        if norm == 0:
            findings.append(Remark("error", "the update is all zero; there is nothing in it to attack"))
        elif not 1e-9 < norm < 1e6:
            findings.append(Remark("warning", f"the update's norm is {norm:.1e}; is its scale right?"))
        quiet = [name for name, t in tensors.items() if not bool(t.any())]
        if quiet and norm > 0:
            findings.append(Remark("warning", f"{len(quiet)} tensors are all zero, the first is '{quiet[0]}'"))
    return findings


def read_knowledge(data: Mapping[str, Any]) -> Knowledge:
    """Return a manifest's knowledge.

    Raises:
        BadInputError: entries of another kind, or below what they can be.
    """
    training = data.get("training")
    named = set(training) if isinstance(training, dict) else set()
    strange = sorted(set(data) - set(Knowledge.__dataclass_fields__))
    strange += sorted(f"training.{name}" for name in named - set(LocalTraining.__dataclass_fields__))
    if strange:
        raise BadInputError(f"the manifest's knowledge is not understood (unknown entry '{strange[0]}')")
    try:
        known = TypeAdapter(Knowledge).validate_python(dict(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInputError(f"the manifest's knowledge is not understood ({where}: {first['msg']})") from None
    problem = knowledge_problem(known)
    if problem:
        raise BadInputError(f"the manifest's knowledge is not understood ({problem})")
    if known.defenses is None:
        return known
    return replace(known, defenses=tuple(describe(one) for one in told_defenses(known)))  # with every field


def told_defenses(known: Knowledge) -> list[Any]:
    """Return the defenses that an attacker was told of.

    Raises:
        BadInputError: a name or a field that there is not.
    """
    try:
        return built_defenses(known.defenses or ())
    except AuditError as error:
        raise BadInputError(f"the manifest's knowledge is not understood (defenses: {error})") from None


def built_defenses(told: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the defenses of descriptions.

    Raises:
        BadInputError: a name or a field that there is not.
    """
    return [build("defense", str(one.get("name", "")), {k: v for k, v in one.items() if k != "name"}) for one in told]


def knowledge_problem(known: Knowledge) -> str:
    """Return what is wrong with the numbers of a manifest's knowledge; empty for nothing."""
    how = known.training
    counts: dict[str, tuple[int | None, ...]] = {
        "batch_size": (known.batch_size,),
        "longest": (known.longest,),
        "lengths": known.lengths or (),
    }
    if how is not None:
        names = ("epochs", "minibatch", "accumulate")
        counts |= {f"training.{name}": (getattr(how, name),) for name in names}
    for name, values in counts.items():
        if any(value is not None and value < 1 for value in values):
            return f"{name} must be at least 1"
    if known.batch_size is not None and known.batch_size > MOST_EXAMPLES:
        return f"batch_size must be at most {MOST_EXAMPLES}"
    if how is not None and how.steps(known.batch_size or 1) > MOST_STEPS:
        return f"training takes {how.steps(known.batch_size or 1)} steps; at most {MOST_STEPS} are read"
    if known.labels is not None and any(label < 0 for label in known.labels):
        return "labels must be at least 0"
    for name, each in (("lengths", known.lengths), ("labels", known.labels)):
        if each is not None and len(each) != (known.batch_size or max(1, len(each))):
            return f"{name} must be as many as batch_size says"
    if known.dropout is not None and not 0 <= known.dropout < 1:
        return "dropout must be at least 0 and below 1"
    if how is not None and not 0 < how.learning_rate < float("inf"):
        return "training.learning_rate must be above 0"
    if how is not None and not 0 < how.eps < float("inf"):
        return "training.eps must be above 0"
    if how is not None and not all(0 <= share < 1 for share in (how.momentum, *how.betas)):
        return "training.momentum and training.betas must be at least 0 and below 1"
    return ""


def _refuse(folder: Path, findings: list[Remark]) -> None:
    """Raise the first error among findings, where there is one."""
    errors = [finding.text for finding in findings if finding.level == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise BadInputError(f"the update in {folder} cannot be attacked: {errors[0]}{more}")


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    if not path.is_file():
        raise BadInputError(f"{path.parent} is not an update bundle: it has no {TENSORS}")
    if path.stat().st_size == 0:
        raise BadInputError(f"{path} is empty")
    with files.stored_tensors(path) as file:
        for name, dtype in file.dtypes.items():
            if dtype not in _FLOATS:
                raise BadInputError(
                    f"the update in {path.parent} cannot be attacked: '{name}' has dtype {dtype}; "
                    "an update is made of floats"
                )
        return file.shapes


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
