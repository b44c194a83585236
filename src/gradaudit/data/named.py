"""Data sets that a case calls by name: where a local copy lies, its layout, and what the hub has in its place."""

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradaudit.data.tables import Table, contents, decoded, parquet, separated
from gradaudit.errors import BadInputError
from gradaudit.models.packages import cache_folder

SetName = Literal["cola", "sst2", "rotten-tomatoes", "wikitext-2", "cifar10"]
FOLDER_VARIABLE = "GRADAUDIT_DATA"
"""The environment variable that names the folder of the local copies."""


@dataclass(frozen=True)
class NamedSet:
    """A data set with a name.

    Args:
        about: one line.
        license: what its publishers say.
        hub: its id on the Hugging Face hub.
        files: for each split, under the hub's name for it, the files of a local copy, from the folder of all copies.
        config: the hub's configuration.
        images: whether it holds images.
        header: whether the first line of a local file names the columns.
        text: column of the text in a local copy.
        label: column of the label in a local copy; None without.
        hub_text: column of the text on the hub.
        hub_image: column of the images on the hub; in a local copy it is "image".
        hub_label: column of the label on the hub; None without.
    """

    about: str
    license: str
    hub: str
    files: Mapping[str, tuple[str, ...]]
    config: str | None = None
    images: bool = False
    header: bool = False
    text: str | int = 0
    label: str | int | None = None
    hub_text: str = "text"
    hub_image: str = "image"
    hub_label: str | None = None


NAMED: Mapping[SetName, NamedSet] = {
    "cola": NamedSet(
        "CoLA 1.0: English sentences, acceptable or not",
        "research use; the copyright of its sentences remains with their publishers",
        hub="nyu-mll/glue",
        config="cola",
        files={"train": ("cola/in_domain_train.tsv",), "validation": ("cola/in_domain_dev.tsv",)},
        text=3,
        label=1,
        hub_text="sentence",
        hub_label="label",
    ),
    "sst2": NamedSet(
        "SST-2 of GLUE: parts of film reviews, positive or negative",
        "research use, none stated",
        hub="nyu-mll/glue",
        config="sst2",
        files={"train": ("sst2/train_10k.tsv",)},
        header=True,
        text=0,
        label=1,
        hub_text="sentence",
        hub_label="label",
    ),
    "rotten-tomatoes": NamedSet(
        "Rotten Tomatoes (Pang and Lee, 2005): sentences of film reviews, positive or negative",
        "research use, none stated",
        hub="cornell-movie-review-data/rotten_tomatoes",
        # a file a class, joined in this order
        files={"train": ("rotten_tomatoes/rt-polarity.neg", "rotten_tomatoes/rt-polarity.pos")},
        text=1,
        label=0,
        hub_label="label",
    ),
    "wikitext-2": NamedSet(
        "WikiText-2: lines of Wikipedia articles, no labels",
        "CC BY-SA 3.0 and GFDL",
        hub="Salesforce/wikitext",
        config="wikitext-2-v1",
        files={
            "train": ("wikitext2/wiki.train.tokens",),
            "validation": ("wikitext2/wiki.valid.tokens",),
            "test": ("wikitext2/wiki.test.tokens",),
        },
    ),
    "cifar10": NamedSet(
        "CIFAR-10: images of 32 x 32 pixels, ten classes",
        "none stated",
        hub="uoft-cs/cifar10",
        images=True,
        files={"train": ("cifar10_jpeg/train.parquet",), "test": ("cifar10_jpeg/test.parquet",)},
        label="label",
        hub_image="img",
        hub_label="label",
    ),
}
"""The sets by name."""


def local_files(name: SetName, split: str) -> tuple[Path, ...]:
    """Return the files of a local copy: in $GRADAUDIT_DATA, else in `data` of the program's cache; empty where none is.

    Raises:
        BadInputError: $GRADAUDIT_DATA is no folder, or holds a part of the set's files.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    if given and not Path(given).is_dir():
        raise BadInputError(f"{FOLDER_VARIABLE} is {given}, which is no folder; set it to the folder of the data sets")
    for folder in ((Path(given),) if given else ()) + (cache_folder() / "data",):
        files = tuple(folder / file for file in NAMED[name].files[split])
        there = [file.is_file() for file in files]
        if all(there):
            return files
        if any(there):
            raise BadInputError(f"{files[there.index(False)]} is missing beside the other file of {name}; add it")
    return ()


def not_here(name: SetName, split: str) -> BadInputError:
    """Return the error for a set that is neither local nor to be had from the hub: it says both ways to get it."""
    wanted = " and ".join(NAMED[name].files[split])
    return BadInputError(
        f"data set '{name}' is not here; set {FOLDER_VARIABLE} to a folder that holds {wanted}, or install "
        f"gradaudit[data] and let it be fetched from the hub ({NAMED[name].hub})"
    )


def local_table(name: SetName, split: str, files: tuple[Path, ...]) -> tuple[Table, bytes]:
    """Return the table of a local copy and the bytes it was read from.

    Raises:
        BadInputError: a file that cannot be read, or is laid out in another way.
    """
    known, where = NAMED[name], f"{name} ({split})"
    read = tuple(contents(file, str(file)) for file in files)
    if len(files) > 1:
        data = "".join(_of_class(label, part, where) for label, part in enumerate(read)).encode()
        return separated(data, where, header=False, tab=True), data
    if files[0].suffix == ".parquet":
        return parquet(read[0], where), read[0]
    return separated(read[0], where, known.header, tab=True), read[0]


def _of_class(label: int, data: bytes, where: str) -> str:
    """Return the sentences of a file that holds one class, a line each, as rows with their label in front."""
    lines = io.StringIO(decoded(data, where), newline=None)
    return "".join(f"{label}\t{' '.join(line.split())}\n" for line in lines if line.strip())
