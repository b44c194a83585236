"""A learned inverter: what it was made for, its network, and both on disk (`inverter.safetensors`, `manifest.json`).

An inverter may come from elsewhere and is not trusted: nothing is unpickled or run, and every size is checked against
the file's header before anything is allocated.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

import gradaudit
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.learned.manifest import (
    MANIFEST,
    Plain,
    Target,
    read_manifest_of,
    read_tensors,
    refuse_misfit,
    write_inverter,
)
from gradaudit.learned.scaling import Scaling
from gradaudit.learned.text.features import sizes_of
from gradaudit.learned.text.hashing import Hash
from gradaudit.learned.text.layers import LayeredNetwork, LayeredShape
from gradaudit.learned.text.network import Network, NetworkShape
from gradaudit.learned.text.plan import Lesson
from gradaudit.learned.text.word_pairs import WordPairs, load_pairs
from gradaudit.learned.training import Trained, with_weights
from gradaudit.registry import describe
from gradaudit.types import Observation

_LARGEST_OUTPUT = 16 << 30
"""Bytes of what a network says of all words at all positions: it is not in the file, which is checked."""


class InverterManifest(Plain):
    """`manifest.json` of an inverter.

    Args:
        format: of the folder.
        program: version of gradaudit that made it.
        learner: LTI's network, or one that reads by layers.
        target: what it is made for.
        bins, hash_seed, signed, apart: of the hash.
        bottleneck, width, length, classes: of the network.
        vocabulary: words of the model.
        ends: the last class says that a sentence has no token here.
        attack: the attack's hyperparameters.
        public: where the public text came from.
        texts: how many of them there were.
        steps: of training.
        accuracy: share of right tokens on public text that was not trained on, 0 to 100.
        pairs: kinds of word pairs that what is read is weighed by; 0 for none.
        pairs_weight: theirs.
    """

    format: Literal[1] = 1
    program: str
    learner: Literal["network", "layers"] = "network"
    target: Target
    bins: int = Field(ge=1, le=1 << 30)
    hash_seed: int = Field(ge=0, lt=1 << 62)
    signed: bool
    apart: tuple[str, int, int] | None = None
    bottleneck: int = Field(ge=1, le=1 << 20)
    width: int = Field(ge=1, le=1 << 20)
    length: int = Field(ge=1, le=1 << 16)
    classes: int = Field(ge=1, le=1 << 26)
    vocabulary: int = Field(ge=1, le=1 << 26)
    ends: bool
    attack: dict[str, Any]
    public: str
    texts: int
    steps: int
    accuracy: float
    pairs: int = Field(0, ge=0, le=1 << 30)
    pairs_weight: float = Field(0.0, ge=0, le=100)

    def network(self) -> NetworkShape | LayeredShape:
        """Return the sizes of the network."""
        size = self.target.batch_size
        if self.learner == "layers":
            own = self.apart[2] // self.length if self.apart is not None else 0
            return LayeredShape(self.bins, own, self.bottleneck, self.width, self.length, self.classes)
        return NetworkShape(self.bins, self.bottleneck, self.width, size, self.length, self.classes)

    def hash(self) -> Hash:
        """Return the hash that the network was trained with."""
        return Hash(sizes_of(self.target.tensors), self.bins, self.hash_seed, self.signed, self.apart)


@dataclass(frozen=True)
class Inverter:
    """A trained network with all that it needs to read an update.

    Args:
        manifest: what it is.
        network: the weights.
        scaling: of its inputs.
        pairs: of words, that what is read is weighed by.
    """

    manifest: InverterManifest
    network: Network | LayeredNetwork
    scaling: Scaling
    pairs: WordPairs | None = None

    @torch.no_grad()
    def sentences(self, seen: Observation) -> tuple[tuple[int, ...], ...]:
        """Return the token ids that the network reads out of an update, a sentence each.

        Raises:
            NotSupportedError: the update is not what the inverter is made for.
        """
        refuse_misfit(self.manifest.target, seen)
        about = self.manifest
        if about.vocabulary != seen.model.vocabulary_size:
            raise NotSupportedError(f"the inverter knows {about.vocabulary} words, the model another number")
        taken = 4 * about.target.batch_size * about.length * about.classes
        if about.length > seen.model.max_length or taken > _LARGEST_OUTPUT:
            raise NotSupportedError(
                f"the inverter reads {about.target.batch_size} sentences of {about.length} tokens: more than the model "
                "takes, or than fits into memory"
            )
        device = next(iter(seen.tensors.values())).device
        values = about.hash()(((n, seen.tensors[n][None].float()) for n in about.target.tensors), 1, device)
        mean, deviation = self.scaling.mean.to(device), self.scaling.deviation.to(device)
        logits = self.network.to(device)(Scaling(mean, deviation)(values))[0]
        frame = {*seen.model.special.prefix, *seen.model.special.suffix}
        silent = [i for i in seen.model.special.ids if i not in frame]
        logits[..., silent] = -torch.inf
        found = logits.argmax(-1)
        if self.pairs is not None:
            found = self.pairs.to(device).likeliest(logits, about.pairs_weight)
        out = []
        for row in found.tolist():
            ends = row.index(about.classes - 1) if about.ends and about.classes - 1 in row else len(row)
            out.append(tuple(int(i) for i in row[:ends]))
        return tuple(sentence for sentence in out if sentence)


def save_inverter(folder: Path, inverter: Inverter) -> Path:
    """Write an inverter into a folder and return it.

    Raises:
        BadInputError: the folder cannot be written.
    """
    weights = dict(inverter.network.named_parameters())
    return write_inverter(folder, inverter.manifest, weights, inverter.scaling, inverter.pairs)


def load_inverter(folder: Path) -> Inverter:
    """Read an inverter; its sizes are checked against the file's header before any of it is loaded.

    Raises:
        BadInputError: not an inverter, truncated, or tensors that are not those of the manifest.
    """
    manifest = read_manifest_of(folder, InverterManifest)
    if manifest.classes != manifest.vocabulary + manifest.ends:
        raise BadInputError(f"{folder / MANIFEST} names {manifest.classes} classes for {manifest.vocabulary} words")
    if manifest.apart is not None:
        name, first, count = manifest.apart
        entries = sizes_of(manifest.target.tensors).get(name, 0)
        inside = first >= 0 and 0 < count < manifest.bins and first + count <= entries
        if not inside or count % manifest.length or manifest.learner != "layers":
            raise BadInputError(f"{folder / MANIFEST} keeps entries apart that '{name}' does not have; it is damaged")
    tensors, scaling = read_tensors(folder, manifest.network().tensors(), manifest.bins)
    pairs = load_pairs(folder, manifest.pairs, manifest.classes) if manifest.pairs else None
    shape = manifest.network()
    network = LayeredNetwork(shape) if isinstance(shape, LayeredShape) else Network(shape)
    return Inverter(manifest, with_weights(network, tensors), scaling, pairs)


def new_manifest(
    lesson: Lesson, hash_: Hash, shape: NetworkShape | LayeredShape, trained: Trained, **more: Any
) -> InverterManifest:
    """Return the manifest of what came of a lesson.

    Args:
        lesson: what was learned from.
        hash_: of the updates.
        shape: of the network.
        trained: its training.
        more: entries beside these, or in their place.
    """
    vocabulary = lesson.model.vocabulary_size
    about: dict[str, Any] = {
        "program": gradaudit.__version__,
        "target": lesson.target,
        "bins": hash_.bins,
        "hash_seed": hash_.seed,
        "signed": hash_.signed,
        "apart": hash_.apart,
        "bottleneck": lesson.plan.bottleneck,
        "width": shape.width,
        "length": shape.length,
        "classes": shape.classes,
        "vocabulary": vocabulary,
        "ends": shape.classes > vocabulary,
        "attack": describe(lesson.plan),
        "public": lesson.public.where,
        "texts": len(lesson.public),
        "steps": trained.steps,
        "accuracy": trained.score,
    }
    return InverterManifest(**about | more)
