"""Where private images come from: the digits of scikit-learn, a parquet file, a folder of classes, or a hub id."""

import hashlib
import io
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradaudit.data.columns import labels_of, pick
from gradaudit.data.draw import shuffled
from gradaudit.data.files import found_file, hub_table, named_hub_table
from gradaudit.data.named import NAMED, SetName, local_files, local_table
from gradaudit.data.rows import BINDERS, MARKS, READERS
from gradaudit.data.spec import PublicSpec, SourceSpec
from gradaudit.data.tables import Table, contents, parquet
from gradaudit.errors import BadInputError
from gradaudit.models.images import ImageModel
from gradaudit.types import ImageBatch, PublicImages

FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
"""Image formats that are decoded."""
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
"""Pillow's kinds of pixels with 8 bits a channel, or fewer."""
LARGEST = 512
"""Longest side of an image, in pixels: read from the header, before anything is decoded."""
MOST_BYTES, MOST_IMAGES = 2**31, 200_000
"""What all decoded images of a source may take, and how many there may be."""


@dataclass(frozen=True)
class ImageRows:
    """Every image of a data source, in its own order.

    Args:
        pixels: [N, C, H, W] uint8.
        labels: class number of each, 0 to C - 1.
        classes: what the source calls class 0, 1, ..., in order.
        where: the source in words, for messages and records.
        sha256: of pixels and labels.
    """

    pixels: Tensor
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    where: str
    sha256: str

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def batch(self, numbers: Sequence[int]) -> ImageBatch:
        """Return some of the images as the batch a client trains on."""
        rows = torch.tensor(list(numbers), dtype=torch.long)
        return ImageBatch(self.pixels[rows].float() / 255, torch.tensor(self.labels)[rows])


def load_images(spec: SourceSpec, base: Path) -> ImageRows:
    """Return all images of the source a spec names.

    Args:
        spec: the source; `image` and `label` name its columns.
        base: folder that a relative path starts from (the case file's); the current folder is tried after it.

    Raises:
        BadInputError: the source cannot be read, images of several sizes or too large, or the extra is missing.
    """
    label = "label" if spec.label is None else spec.label
    if spec.hub is not None:
        table, declared = hub_table(spec.hub, spec, label, spec.image)
        return _of_table(table, spec.image, label, declared)
    if spec.set_name is not None:
        return _named(spec.set_name, spec)
    if spec.source == "words":
        raise BadInputError('words are no images: give [public] a path or a hub id, or source = "digits"')
    if spec.path is None:
        return _digits()
    place = found_file(spec.path, base, folders=True)
    if place.is_dir():
        return _folder(place, spec.path)
    if place.suffix.lower() != ".parquet":
        raise BadInputError(f"{spec.path} holds no images: give a parquet file, or a folder with a folder for a class")
    return _of_table(parquet(contents(place, spec.path), spec.path), spec.image, label, ())


def public_images(
    rows: ImageRows, private: ImageRows, audited: Sequence[Sequence[int]], spec: PublicSpec | None = None
) -> PublicImages:
    """Return the images of a source that the attacker may have: those that equal none of the audited ones.

    Compared by their pixels, so that a copy in another source, or twice in one, is left out as well.

    Args:
        rows: the attacker's source, perhaps the private one itself.
        private: the private source.
        audited: row numbers of its batches.
        spec: the [public] table, which may limit and shuffle them; None takes all in their order.

    Raises:
        BadInputError: images of another shape or with classes that are not the private source's, or none left.
    """
    if rows.shape != private.shape:
        raise BadInputError(
            f"[public] has images of {_size(rows.shape)} and [data] of {_size(private.shape)}; they must be alike"
        )
    unknown = [name for name in rows.classes if name not in private.classes]
    if unknown:
        raise BadInputError(f"[public] has a class '{unknown[0][:40]}' that [data] does not have")
    hidden = {_key(private.pixels[n]) for batch in audited for n in batch}
    order = list(range(len(rows))) if spec is None else shuffled(spec, len(rows))
    kept = [n for n in order if _key(rows.pixels[n]) not in hidden][: spec.rows if spec is not None else None]
    if not kept:
        raise BadInputError("no image is left for the attacker: all are in audited batches; give other [public] data")
    chosen = torch.tensor(kept)
    classes = torch.tensor([private.classes.index(name) for name in rows.classes])
    labels = classes[torch.tensor(rows.labels)[chosen]]
    pixels = rows.pixels[chosen]
    return PublicImages(pixels.float() / 255, labels, f"{rows.where}, {len(kept)} images", _sha256(pixels, labels))


def _key(pixels: Tensor) -> bytes:
    return hashlib.sha256(pixels.contiguous().numpy().tobytes()).digest()


def _sha256(pixels: Tensor, labels: Tensor) -> str:
    digest = hashlib.sha256(str(tuple(pixels.shape)).encode())
    digest.update(pixels.contiguous().numpy().data)
    digest.update(labels.contiguous().numpy().data)
    return digest.hexdigest()


def _size(shape: tuple[int, int, int]) -> str:
    return f"{shape[2]} x {shape[1]} pixels in {shape[0]} channel{'s' * (shape[0] > 1)}"


def _made(pixels: Tensor, labels: Sequence[int], classes: Sequence[str], where: str) -> ImageRows:
    digest = _sha256(pixels, torch.tensor(labels, dtype=torch.long))
    return ImageRows(pixels, tuple(labels), tuple(classes), where, digest)


def _digits() -> ImageRows:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise BadInputError("the embedded digits need scikit-learn: pip install 'gradaudit[vision]'") from None
    found = load_digits()
    # 17 levels of gray, 0 to 16
    pixels = torch.from_numpy(np.rint(found.images * (255 / 16)).astype(np.uint8))[:, None]
    labels = [int(y) for y in found.target]
    return _made(pixels, labels, [str(y) for y in range(10)], "the digits of scikit-learn, 8 x 8")


def _named(name: SetName, spec: SourceSpec) -> ImageRows:
    """Return the images of a named set, from a local copy or else from the hub."""
    known = NAMED[name]
    if not known.images or known.label is None or known.hub_label is None:
        raise BadInputError(f"data set '{name}' has texts, not images; set source to one of images, or task to another")
    files = local_files(name, spec.split)
    if files:
        return _of_table(local_table(name, spec.split, files)[0], "image", known.label, ())
    table, declared = named_hub_table(name, spec)
    return _of_table(table, known.hub_image, known.hub_label, declared)


def _folder(place: Path, where: str) -> ImageRows:
    classes = sorted(p.name for p in place.iterdir() if p.is_dir() and not p.name.startswith("."))
    files = [
        (file, number)
        for number, name in enumerate(classes)
        for file in sorted((place / name).iterdir())
        if file.is_file() and file.suffix.lower() in ENDINGS
    ]
    if not files:
        raise BadInputError(f"{where} holds no images: it must have a folder for each class with {', '.join(ENDINGS)}")
    _check_count(len(files), where)
    return _decoded(((contents(f, str(f)), str(f)) for f, _ in files), [label for _, label in files], classes, where)


def _of_table(table: Table, image: str | int, label: str | int, declared: tuple[str, ...]) -> ImageRows:
    values = table.column(pick(table, "image", image))
    _check_count(len(values), table.where)
    labels, classes = labels_of(table, pick(table, "label", label), declared)
    places = [f"{table.place(row)} of {table.where}" for row in range(len(values))]
    encoded = ((_encoded(value, place), place) for value, place in zip(values, places, strict=True))
    return _decoded(encoded, labels, classes, table.where)


def _encoded(value: Any, place: str) -> bytes:
    found = value.get("bytes") if isinstance(value, dict) else value  # a path in a file from elsewhere is not followed
    if not isinstance(found, bytes):
        raise BadInputError(f"{place} holds no image bytes; set image to a column of encoded images")
    return found


def _check_count(count: int, where: str) -> None:
    if count > MOST_IMAGES:
        raise BadInputError(f"{where} holds {count} images; at most {MOST_IMAGES} are read, take a part of them")


def _decoded(
    encoded: Iterable[tuple[bytes, str]], labels: Sequence[int], classes: Sequence[str], where: str
) -> ImageRows:
    """Return the rows of encoded images, each with its place in words: all gray or all colored, of one size."""
    images, places, total = [], [], 0
    for data, place in encoded:
        images.append(_image(data, place))
        places.append(place)
        total += images[-1].nbytes
        if total > MOST_BYTES:
            raise BadInputError(f"{where} holds more than {MOST_BYTES >> 20} MiB of pixels; take a part of it")
    gray = all(array.ndim == 2 for array in images)
    made = [a[None] if gray else (a if a.ndim == 3 else np.stack([a] * 3, -1)).transpose(2, 0, 1) for a in images]
    first = made[0].shape
    for array, place in zip(made, places, strict=True):
        if array.shape != first:
            sizes = f"{array.shape[2]} x {array.shape[1]} pixels, the first {first[2]} x {first[1]}"
            raise BadInputError(f"{place} has {sizes}; bring all images to one size first")
    return _made(torch.from_numpy(np.stack(made)), labels, classes, where)


def _image(data: bytes, place: str) -> Any:
    """Return an image as [H, W] or [H, W, 3] uint8."""
    try:
        from PIL import Image
    except ImportError:
        raise BadInputError("decoding images needs Pillow: pip install 'gradaudit[vision]'") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's on large images: their size is checked below
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if max(image.size) > LARGEST:
                    raise BadInputError(
                        f"{place} is an image of {image.size[0]} x {image.size[1]} pixels; at most {LARGEST} a side"
                    )
                if image.mode == "I" or image.mode.startswith("I;16"):  # 16 bits of gray, which Pillow would cut off
                    return (np.asarray(image).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8)
                if image.mode not in _MODES:
                    raise BadInputError(
                        f"{place} has pixels of a kind that is not read ('{image.mode}'); save it as RGB"
                    )
                return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    except BadInputError:
        raise
    except Exception as error:  # damaged images raise dozens of kinds
        kind = type(error).__name__
        raise BadInputError(f"{place} is no readable image ({kind}); known are {', '.join(FORMATS)}") from None


@dataclass(frozen=True)
class Images:
    """Images beside the model that reads them.

    Args:
        model: of images.
        source: the images.
    """

    model: ImageModel
    source: ImageRows

    def __len__(self) -> int:
        return len(self.source)

    @property
    def where(self) -> str:
        return self.source.where

    @property
    def sha256(self) -> str:
        return self.source.sha256

    def can_train(self, row: int) -> bool:
        return True

    def disjoint(self, rows: Sequence[int], test: Sequence[int]) -> list[int]:
        held = {_key(self.source.pixels[row]) for row in test}
        return [row for row in rows if _key(self.source.pixels[row]) not in held]

    def batch(self, rows: Sequence[int]) -> ImageBatch:
        return self.source.batch(rows)

    @torch.no_grad()
    def said(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        batch = self.source.batch(rows)
        return self.model.logits(batch.images.to(self.model.device)).argmax(1).cpu(), batch.labels


def _marks(data: Any, model: ImageModel) -> list[bytes]:
    """Return the pixels of each image."""
    return [image.numpy().tobytes() for image in (255 * data.images).round().to(torch.uint8).cpu()]


READERS.add("images", load_images)
BINDERS.add("images", Images)
MARKS.add("images", _marks)
