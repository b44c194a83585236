"""What a case names, loaded and checked before any batch runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from gradaudit.attacks.base import Attack
from gradaudit.audit.fitting import check_told, public_text
from gradaudit.case import Case
from gradaudit.client.client import Client
from gradaudit.client.error_feedback import after_rounds, earlier_rounds
from gradaudit.client.warm_up import warm_up, warm_up_rows
from gradaudit.data.draw import draw, draw_numbers
from gradaudit.data.files import found_file
from gradaudit.data.images import ImageRows, load_images, public_images
from gradaudit.data.text import Rows, load_rows, make_batch, numbered
from gradaudit.data.windows import windows
from gradaudit.defenses.base import Defense, ExampleDefense, UpdateDefense
from gradaudit.errors import BadInputError, MissingKnowledgeError, NotSupportedError
from gradaudit.learned.public import Public
from gradaudit.metrics.perceptual import Perceptual, load_perceptual
from gradaudit.models.base import Model
from gradaudit.models.images import ImageModel, load_image_model
from gradaudit.models.spec import ModelSpec
from gradaudit.models.transformers import TransformersModel
from gradaudit.models.zoo import head_classes, load_model
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Batch, PublicImages


@dataclass(frozen=True)
class Prepared:
    """A case of text with its model, data and attack at hand."""

    case: Case
    model: TransformersModel
    rows: Rows
    batches: list[tuple[int, ...]]
    client: Client
    selection: Selection
    attack: Attack
    device: torch.device
    public: Public | None = None


def pick_device(name: str) -> torch.device:
    """Return the device of a name; "auto" takes a GPU when there is one.

    Raises:
        BadInputError: an unknown device, or one that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInputError(f"unknown device '{name}'; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInputError("device 'cuda' is not there; use --device cpu or auto")
    if device.type not in ("cpu", "cuda"):
        raise BadInputError(f"device '{name}' is not supported; use auto, cpu or cuda")
    return device


def prepare(
    case: Case, base: Path, device: torch.device, loaded: Model | None = None, read: Rows | None = None
) -> Prepared | PreparedImages:
    """Load what a case names and check that it fits together, before any batch runs.

    Args:
        case: the case.
        base: folder that relative data paths start from.
        device: where the model goes.
        loaded: a model that is already at hand with this case's spec.
        read: the rows of its text source, where they are already at hand.

    Raises:
        BadInputError: data, model or selection that cannot be used.
        MissingKnowledgeError: the attack needs what [knowledge] does not give.
    """
    attack = case.build_attack()
    missing = [need for need in attack.needs if not getattr(case.knowledge, need, True)]
    if missing:
        raise MissingKnowledgeError(
            f"attack '{attack.name}' must be given {', '.join(missing)}: set {missing[0]} = true in [knowledge]"
        )
    if attack.unfitted:
        check_told(case)
    if case.task == "image-classification":
        return prepare_images(case, base, device, loaded)
    return prepare_text(case, base, device, loaded, read)


def prepare_text(
    case: Case, base: Path, device: torch.device, loaded: Model | None = None, read: Rows | None = None
) -> Prepared:
    """Load what a case of text names; see `prepare`."""
    attack = case.build_attack()
    rows = load_rows(case.data, base) if read is None else read
    if case.task == "classification" and rows.labels is None:
        raise BadInputError('task "classification" needs a label column: set label in [data]')
    if case.task == "classification":
        rows = numbered(rows, head_classes(case.model))
    window = case.data.window
    batches = draw(case.data, rows) if window is None else []
    spec = ModelSpec(
        case.model,
        case.task,
        max(2, len(rows.classes)),
        seed=case.seed,
        layers=case.layers,
        lora=case.lora.given() if case.lora is not None else None,
        loss=case.loss,
    )
    model = loaded if isinstance(loaded, TransformersModel) else load_model(spec, device)
    if window is not None:
        rows = windows(rows, model, window, whole=True)
        batches = draw(case.data, rows)
    if loaded is None and spec.lora is not None and spec.lora.warmup:
        warm_up(model, _public_batches(case, model, rows, batches, spec.lora.warmup))
    selection = Selection(case.selection.tensors)
    client = client_of(case, model)
    check_counters(case, attack, client)
    frozen = client.frozen()
    if all(view.parameter in frozen for view in selection.views(model).values()):
        raise BadInputError(f"selection '{selection.expression}' picks only frozen parameters; nothing is sent of them")
    earlier = earlier_numbers(case, client, len(rows.texts), batches)
    client = after_rounds(
        client, (_batch(case, model, rows, some) for some in earlier), stream(case.seed, "earlier rounds")
    )
    public = None
    if case.public is not None:
        public = public_text(case.public, base, model, window, rows, batches)
    return Prepared(case, model, rows, batches, client, selection, attack, device, public)


def _public_batches(
    case: Case, model: TransformersModel, rows: Rows, private: Sequence[tuple[int, ...]], count: int
) -> Iterator[Batch]:
    """Yield batches of rows that are in no private batch, over again where there are few."""
    for numbers in warm_up_rows(case.seed, len(rows.texts), private, count):
        yield _batch(case, model, rows, numbers)


def private_batch(ready: Prepared, index: int) -> Batch:
    """Return the private batch of one index."""
    return _batch(ready.case, ready.model, ready.rows, ready.batches[index])


def _batch(case: Case, model: TransformersModel, rows: Rows, numbers: Sequence[int]) -> Batch:
    labels = None
    if case.task == "classification" and rows.labels is not None:
        labels = [rows.labels[i] for i in numbers]
    ids = None if rows.ids is None else [rows.ids[i] for i in numbers]
    return make_batch(model, [rows.texts[i] for i in numbers], labels, ids)


@dataclass(frozen=True)
class PreparedImages:
    """A case of images with its model, data and attack at hand; `public` is what the attacker has from elsewhere."""

    case: Case
    model: ImageModel
    rows: ImageRows
    batches: list[tuple[int, ...]]
    client: Client
    selection: Selection
    attack: Attack[ImageModel]
    device: torch.device
    public: PublicImages | None
    perceptual: Perceptual | None = None


def prepare_images(case: Case, base: Path, device: torch.device, loaded: Model | None = None) -> PreparedImages:
    """Load what a case of images names and check that it fits together; see `audit.prepare`.

    The attacker's images are those of [public], or the digits that are in no audited batch where the case audits the
    embedded digits; audited images are never among them.
    """
    attack: Attack[ImageModel] = case.build_attack()
    if case.metrics.published:
        raise BadInputError("[metrics] published names scorings of text; leave it away for images")
    rows = load_images(case.data, base)
    batches = draw_numbers(case.data, len(rows), rows.where)
    public = None
    if case.public is not None:
        public = public_images(load_images(case.public, base), rows, batches, case.public)
    elif case.data.source == "digits" and len(rows) > sum(map(len, batches)):
        public = public_images(rows, rows, batches)
    if "public" in attack.needs and public is None:
        raise MissingKnowledgeError(f"attack '{attack.name}' must be given public: add a [public] table with images")
    spec = ModelSpec(
        case.model,
        case.task,
        max(2, len(rows.classes)),
        seed=case.seed,
        layers=case.layers,
        lora=case.lora.given() if case.lora is not None else None,
        loss=case.loss,
        image=rows.shape,
    )
    model = loaded if isinstance(loaded, ImageModel) else load_image_model(spec, device)
    selection = Selection(case.selection.tensors)
    client = client_of(case, model)
    check_counters(case, attack, client)
    frozen = client.frozen()
    if all(view.parameter in frozen for view in selection.views(model).values()):
        raise BadInputError(f"selection '{selection.expression}' picks only frozen parameters; nothing is sent of them")
    earlier = earlier_numbers(case, client, len(rows), batches)
    client = after_rounds(client, (rows.batch(some) for some in earlier), stream(case.seed, "earlier rounds"))
    weights = case.metrics.lpips
    perceptual = None if weights is None else load_perceptual(found_file(weights, base))
    return PreparedImages(case, model, rows, batches, client, selection, attack, device, public, perceptual)


M = TypeVar("M", bound=Model)


def client_of(case: Case, model: Model) -> Client:
    """Return the client of a case's [client] and [[defense]] tables, training a model."""
    how = case.client
    return Client(
        model,
        how.training(),
        how.dropout,
        how.freeze,
        case.build_defenses(),
        how.dropout_rate,
        how.padding,
        how.clients,
    )


def check_counters(case: Case, attack: Attack[M], client: Client) -> None:
    """Refuse to run an attack, as if nothing were in force, against defenses that it was told of.

    Raises:
        NotSupportedError: it has no counter to one that acts on gradients.
    """
    size = case.data.batch_size if case.knowledge.batch_size else None
    told = client.defenses if case.knowledge.defenses else ()
    without = uncountered(attack, told, client.model, size)
    if without is not None:
        raise NotSupportedError(
            f"attack '{attack.name}' has no counter to '{without}' here, of which it was told; choose another "
            "attack, or defenses = false in [knowledge] for an attacker who does not know of it"
        )


def uncountered(attack: Attack[M], told: Sequence[Defense], model: Model, size: int | None) -> str | None:
    """Return the first defense on gradients of which an attack was told and to which it has no counter; None for none.

    Args:
        attack: the attack.
        told: the defenses.
        model: that is attacked.
        size: examples of the batch, where it is told.
    """
    for defense in told:
        acts = isinstance(defense, UpdateDefense | ExampleDefense)
        if acts and not attack.reckons_with(defense.name, model, size):
            return defense.name
    return None


def earlier_numbers(
    case: Case, client: Client, rows: int, audited: Sequence[Sequence[int]]
) -> Iterator[tuple[int, ...]]:
    """Yield the rows of each round that a client with error feedback has behind it: of none of the audited batches.

    Args:
        case: whose seed and batch size they have.
        client: of the case.
        rows: in the data.
        audited: numbers of the rows of each audited batch.

    Raises:
        BadInputError: too few rows.
    """
    size, rounds = case.data.batch_size, earlier_rounds(client)
    if not rounds:
        return
    kept = {number for batch in audited for number in batch}
    others = [number for number in range(rows) if number not in kept]
    if len(others) < size:
        raise BadInputError(
            f"error feedback needs {size} rows or more that are in no audited batch; give more data, or rounds = 0"
        )
    order = torch.randperm(len(others), generator=stream(case.seed, "earlier rows")).tolist()
    for number in range(rounds):
        yield tuple(others[order[(number * size + n) % len(others)]] for n in range(size))
