"""What a case names, loaded and checked before any batch runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from gradaudit.attacks.base import Attack
from gradaudit.audit import images, text  # noqa: F401 - each registers what it loads
from gradaudit.audit.loading import LOADERS, Loaded
from gradaudit.case import Case
from gradaudit.client.client import Client
from gradaudit.client.error_feedback import after_rounds, earlier_rounds
from gradaudit.client.warm_up import other_rows
from gradaudit.data.rows import READERS
from gradaudit.defenses.base import Defense, ExampleDefense, UpdateDefense
from gradaudit.errors import BadInputError, MissingKnowledgeError, NotSupportedError
from gradaudit.models.base import Model
from gradaudit.models.spec import kind_of
from gradaudit.registry import known
from gradaudit.selection import Selection
from gradaudit.streams import stream


@dataclass(frozen=True, kw_only=True)
class Prepared(Loaded):
    """A case with its model, data and attack at hand.

    Args:
        case: the case.
        client: trains on the data.
        selection: what the attacker sees of an update.
        attack: the attack.
        device: where all of it runs.
    """

    case: Case
    client: Client
    selection: Selection
    attack: Attack[Any]
    device: torch.device


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


def prepare(case: Case, base: Path, device: torch.device, loaded: Model | None = None, read: Any = None) -> Prepared:
    """Load what a case names and check that it fits together, before any batch runs.

    Args:
        case: the case.
        base: folder that relative data paths start from.
        device: where the model goes.
        loaded: a model that is at hand: taken if it is the one that the case names.
        read: what its kind's reader read, where that is already at hand.

    Raises:
        BadInputError: data, model, selection or files of the attack that cannot be used.
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
    kind = kind_of(case.task)
    source = READERS[kind](case.data, base) if read is None else read
    found = LOADERS[kind](case, source, base, device, loaded)
    if "public" in attack.needs and found.public is None:
        raise MissingKnowledgeError(f"attack '{attack.name}' must be given public: add a [public] table with {kind}")
    model, rows, batches = found.model, found.rows, found.batches
    attack.load(device)
    selection = Selection(case.selection.tensors)
    client = client_of(case, model)
    check_counters(case, attack, client)
    frozen = client.frozen()
    if all(view.parameter in frozen for view in selection.views(model).values()):
        raise BadInputError(f"selection '{selection.expression}' picks only frozen parameters; nothing is sent of them")
    earlier = earlier_numbers(case, client, len(rows), batches)
    client = after_rounds(client, (rows.batch(some) for some in earlier), stream(case.seed, "earlier rounds"))
    return Prepared(**vars(found), case=case, client=client, selection=selection, attack=attack, device=device)


def private_batch(ready: Prepared, index: int) -> Any:
    """Return the private batch of one index: a `Private` of the case's kind of data."""
    return ready.rows.batch(ready.batches[index])


M = TypeVar("M", bound=Model)


def client_of(case: Case, model: Model) -> Client:
    """Return the client of a case's [client] and [[defense]] tables, training a model."""
    how, defenses = case.client, case.build_defenses()
    return Client(model, how.training(), how.dropout, how.freeze, defenses, how.dropout_rate, how.padding, how.clients)


def check_told(case: Case) -> None:
    """Refuse to learn through settings of the client that the attacker is not given: it could not simulate them.

    Raises:
        MissingKnowledgeError: names the first that is not given.
    """
    for fact in ("batch_size", "training", "dropout", "defenses"):
        if not getattr(case.knowledge, fact):
            raise MissingKnowledgeError(
                f"an attack that learns simulates the client, and is not given its {fact.replace('_', ' ')}: set "
                f"{fact} = true in [knowledge], or name an inverter that was fitted to a guess of it"
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
            f"attack '{attack.name}' has no counter to '{without}' here, of which it was told; "
            f"{able(told, client.model, size)}, or set defenses = false in [knowledge] for an attacker who does not "
            "know of it"
        )


def able(told: Sequence[Defense], model: Model, size: int | None) -> str:
    """Return which attacks reckon with all of some defenses, as advice.

    Args:
        told: the defenses.
        model: that is attacked.
        size: examples of the batch, where it is told.
    """
    # those that take anything look at nothing, or learn beforehand
    every = [cls() for cls in known("attack").values() if cls.takes(model.spec.task) and not cls.takes_any]
    names = [one.name for one in every if uncountered(one, told, model, size) is None]
    return f"try {', '.join(names)}" if names else "no attack here has"


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
    others = other_rows(rows, audited, stream(case.seed, "earlier rows"))
    if len(others) < size:
        raise BadInputError(
            f"error feedback needs {size} rows or more that are in no audited batch; give more data, or rounds = 0"
        )
    for number in range(rounds):
        yield tuple(others[(number * size + n) % len(others)] for n in range(size))
