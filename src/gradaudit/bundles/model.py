"""The model that a bundle names or holds: read as untrusted as the rest of the bundle."""

from dataclasses import replace
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field

from gradaudit.bundles.model_files import ADAPTER, check_model_files
from gradaudit.errors import BadInputError, broken_by
from gradaudit.models.images import IMAGE_MODELS, ImageModel, image_module, load_image_model
from gradaudit.models.spec import Lora, Loss, ModelSpec, Task
from gradaudit.models.transformers import TransformersModel
from gradaudit.models.zoo import EMBEDDED, load_model, without_weights

MODEL, WEIGHTS = "model", "weights.safetensors"
"""A bundle's folder of its own model, and the file in it that holds a model of images."""
_SPARE = 64 << 20
"""Bytes that a model of images may have beyond four times what its bundle stores: frozen parameters are not sent."""


class ModelEntry(BaseModel):
    """Which model the update belongs to.

    Args:
        name: embedded name, hub id, folder; for a captured model of text a title only, of images its architecture.
        inside: True when the weights lie in the bundle's own folder "model".
        adapters: True when LoRA adapters lie beside the weights that are inside, in that folder's own "adapter".
        fingerprint: sha256 of all weights at which the update was made.
        image: channels, height and width of the images; None of text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    task: Task
    labels: int = Field(ge=1, le=100_000)
    loss: Loss = "cross-entropy"
    seed: int = 0
    layers: int | None = None
    image: tuple[int, int, int] | None = None
    inside: bool = False
    adapters: bool = False
    fingerprint: str


def load_bundle_model(
    folder: Path,
    entry: ModelEntry,
    sent: int,
    device: torch.device | None = None,
    other: str | None = None,
    blocks: int | None = None,
) -> TransformersModel | ImageModel:
    """Return the model of a bundle.

    Args:
        folder: the bundle.
        entry: what its manifest says of the model.
        sent: bytes of the bundle's update.
        device: where the weights go; the CPU when None.
        other: a model name in place of the one the manifest names.
        blocks: how many of the model's first blocks to read; None for all.

    Raises:
        BadInputError: no such model, a damaged one, or one that asks for far more memory than the bundle fills.
    """
    if (entry.image is None) != (entry.task != "image-classification"):
        raise BadInputError(f"the manifest's model of task '{entry.task}' has image = {entry.image}; one is wrong")
    own = folder / MODEL
    inside = entry.inside and other is None
    if inside and (own.is_symlink() or not own.is_dir()):
        raise BadInputError(f"{folder} says that its model is inside, and has no folder '{MODEL}'")
    if not entry.inside and other is None:
        _check_place(folder, entry.name)
    spec = ModelSpec(
        other or entry.name,
        entry.task,
        entry.labels,
        entry.seed,
        entry.layers,
        loss=entry.loss,
        loaded=blocks,
        image=entry.image,
    )
    if entry.image is not None:
        if inside:
            sent += sum(path.stat().st_size for path in own.glob("*.safetensors"))
            spec = replace(spec, name=f"{entry.name.partition(':')[0]}:{own / WEIGHTS}")
        _check_image_size(spec, sent)
        return load_image_model(spec, device)
    if inside:
        check_model_files(own)
        check_size(own, spec)
        lora = Lora(folder=str(own / ADAPTER)) if entry.adapters else None
        spec = replace(spec, name=str(own), lora=lora)
    return load_model(spec, device)


def _check_image_size(spec: ModelSpec, stored: int) -> None:
    """Refuse images and classes that ask for far more memory than was sent."""
    if spec.name.partition(":")[0] not in IMAGE_MODELS:
        return  # `load_image_model` names those there are
    with torch.device("meta"):
        module = image_module(spec)
    asked = sum(p.numel() * p.element_size() for p in module.parameters())
    if asked > 4 * stored + _SPARE:
        raise BadInputError(
            f"the bundle's model has {asked >> 20} MiB of weights for {stored >> 20} MiB that were sent; not loaded"
        )


def _check_place(folder: Path, name: str) -> None:
    """Refuse a manifest that chooses a folder or a file of this machine: whoever has the bundle chooses."""
    if name in EMBEDDED or name in IMAGE_MODELS:
        return
    if name.startswith((".", "/", "~")) or Path(name).exists() or Path(name.partition(":")[2] or name).exists():
        raise BadInputError(
            f"the manifest of {folder} names the model '{name}' on this machine; to read it, say so: --model {name}"
        )


def check_size(folder: Path, spec: ModelSpec) -> None:
    """Refuse a model folder whose configuration asks for far more memory than its weights fill."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with broken_by(f"the model in {folder}"):
        module = without_weights(replace(spec, name=str(folder)))
    asked = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    if asked > 4 * stored + (1 << 20):
        raise BadInputError(
            f"the model in {folder} is configured for {asked >> 20} MiB and stores {stored >> 20} MiB; not loaded"
        )
