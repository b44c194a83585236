"""A learned inverter: what it was made for, its network, and both on disk (`inverter.safetensors`, `manifest.json`).

An inverter may come from elsewhere and is not trusted: nothing is unpickled or run, and every size is checked against
the file's header before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import gradaudit
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.learned.features import Scaling, sizes_of
from gradaudit.learned.hashing import Hash
from gradaudit.learned.layers import LayeredNetwork, LayeredShape
from gradaudit.learned.network import Network, NetworkShape
from gradaudit.learned.word_pairs import PAIRS, WordPairs, load_pairs, save_pairs
from gradaudit.models.spec import Loss, Task
from gradaudit.types import Observation, UpdateKind

P = TypeVar("P", bound="Plain")
MANIFEST, WEIGHTS = "manifest.json", "inverter.safetensors"
_LARGEST_MANIFEST = 16 << 20
_LARGEST_OUTPUT = 16 << 30
"""Bytes of what a network says of all words at all positions: it is not in the file, which is checked."""


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


class Manifest(Plain):
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


@dataclass(frozen=True)
class Inverter:
    """A trained network with all that it needs to read an update.

    Args:
        manifest: what it is.
        network: the weights.
        scaling: of its inputs.
        pairs: of words, that what is read is weighed by.
    """

    manifest: Manifest
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
        hash_ = Hash(sizes_of(about.target.tensors), about.bins, about.hash_seed, about.signed, about.apart)
        values = hash_(((n, seen.tensors[n][None].float()) for n in about.target.tensors), 1, device)
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
        "training": None if known.training is None else asdict(known.training),
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


def save_inverter(folder: Path, inverter: Inverter) -> Path:
    """Write an inverter into a folder and return it.

    Raises:
        BadInputError: the folder cannot be written.
    """
    weights = dict(inverter.network.named_parameters())
    return write_inverter(folder, inverter.manifest, weights, inverter.scaling, inverter.pairs)


def write_inverter(
    folder: Path, manifest: Plain, weights: Mapping[str, Tensor], scaling: Scaling, pairs: WordPairs | None = None
) -> Path:
    """Write a manifest, what was learned and its scaling; the manifest comes last, so that a folder with one is whole.

    Raises:
        BadInputError: the folder cannot be written.
    """
    tensors = {n: p.detach().cpu().contiguous() for n, p in weights.items()}
    tensors |= {"mean": scaling.mean.cpu(), "deviation": scaling.deviation.cpu()}
    fresh = folder / f"{MANIFEST}.new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS)
        if pairs is not None:
            save_pairs(folder, pairs)
        fresh.write_text(manifest.model_dump_json(indent=1), encoding="utf8")
        os.replace(fresh, folder / MANIFEST)
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


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of an inverter of text; see `read_manifest_of`."""
    return read_manifest_of(folder, Manifest)


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
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise BadInputError(f"{path} is larger than any manifest; not read")
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInputError(f"{path} is not the manifest of such an inverter ({where}: {first['msg']})") from None


def load_inverter(folder: Path) -> Inverter:
    """Read an inverter; its sizes are checked against the file's header before any of it is loaded.

    Raises:
        BadInputError: not an inverter, truncated, or tensors that are not those of the manifest.
    """
    manifest = read_manifest(folder)
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
    return Inverter(manifest, with_weights(manifest.network(), tensors), scaling, pairs)


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
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            shapes = {n: tuple(file.get_slice(n).get_shape()) for n in names}
            if shapes != wanted or any(file.get_slice(n).get_dtype() != "F32" for n in names):
                raise BadInputError(f"{path} does not hold the network that {MANIFEST} describes; it is damaged")
            tensors = {n: file.get_tensor(n) for n in wanted}
    except (SafetensorError, OSError) as error:
        raise BadInputError(f"{path} is missing, truncated or not a safetensors file ({error})") from None
    if not all(bool(t.isfinite().all()) for n, t in tensors.items() if n != "deviation"):
        raise BadInputError(f"{path} holds NaN or infinite weights")
    return tensors, Scaling(tensors.pop("mean"), tensors.pop("deviation"))


def with_weights(shape: NetworkShape | LayeredShape, tensors: Mapping[str, Tensor]) -> Network | LayeredNetwork:
    """Return a network of given weights, in evaluation."""
    network = LayeredNetwork(shape) if isinstance(shape, LayeredShape) else Network(shape)
    network.load_state_dict(dict(tensors), assign=True)
    return network.requires_grad_(False).eval()


def new_manifest(**about: Any) -> Manifest:
    """Return a manifest of this program's version."""
    return Manifest(program=gradaudit.__version__, **about)
