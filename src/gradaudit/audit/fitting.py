"""Attacks that learn: what they are fitted to, from which public text, and where the result is kept."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradaudit.attacks.base import Attack
from gradaudit.audit.fitted_rows import note_rows
from gradaudit.audit.prepare import Prepared, check_told
from gradaudit.client import simulate_images, simulate_text  # noqa: F401 - each registers its simulation
from gradaudit.client.client import Client
from gradaudit.client.simulation import SIMULATIONS, ReplayedClient
from gradaudit.errors import BadInputError, broken_by
from gradaudit.files import only_writer, replacing
from gradaudit.learned.manifest import MANIFEST, Target
from gradaudit.models.spec import kind_of
from gradaudit.registry import describe
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import PublicData

INVERTERS = "inverters"
"""Folder of what was fitted, under that of a run or a sweep."""
_FORM = 2
"""Of fitting: another one fits anew."""
_FACTS = ("public", "texts", "images", "steps", "accuracy", "mse")
"""What of a manifest `gradaudit fit` prints, where it is there."""
_KEY = "key.txt"
"""What a folder of `gradaudit fit` was made from."""


def simulation_of(client: Client, selection: Selection) -> ReplayedClient:
    """Return what replays a client on public data."""
    # what this client holds back of its earlier rounds is made of private data
    return SIMULATIONS[kind_of(client.model.spec.task)](replace(client, held=None), selection)


def target_of(client: Client, selection: Selection, batch_size: int) -> Target:
    """Return what an attack on this client's updates is fitted to."""
    simulation, model = simulation_of(client, selection), client.model
    dropout = client.dropout_in_force()
    trained = hashlib.sha256("\n".join(client.trained()).encode()).hexdigest()
    return Target(
        title=model.spec.title,
        fingerprint=model.fingerprint(),
        task=model.spec.task,
        kind="gradient" if client.training.optimizer == "none" else "delta",
        tensors=dict(simulation.shapes),
        batch_size=batch_size,
        defenses=tuple(json.loads(json.dumps(describe(d))) for d in client.defenses),
        training=client.made({}).training.described(),  # as an attacker is told of it
        dropout=dropout,
        loss=model.spec.loss,
        replayed={
            "clients": client.clients,
            "padding": client.padding,
            "dropout_rate": client.dropout_rate,
            "trained": trained,
        },
    )


def fit(
    attack: Attack[Any],
    client: Client,
    selection: Selection,
    public: PublicData,
    batch_size: int,
    seed: int,
    folder: Path,
) -> Attack[Any]:
    """Fit an attack into a folder and return it; a fit that was stopped goes on.

    Args:
        attack: one that learns.
        client: whose updates it is to read.
        selection: what is seen of them.
        public: the attacker's text.
        batch_size: sentences an update.
        seed: the case's.
        folder: becomes the inverter.

    Raises:
        NotSupportedError: the attack learns nothing.
        BadInputError: the folder cannot be written, or another program writes there; too little text.
    """
    target = target_of(client, selection, batch_size)
    with only_writer(folder):
        simulation = simulation_of(client, selection)
        note_rows(folder, public, client.model)  # first: a folder with an inverter is one that says what it has seen
        fitted = attack.fit(simulation, public, target, client.model, folder, stream(seed, "fit"))
        (folder / "checkpoint.safetensors").unlink(missing_ok=True)
    return fitted


def fit_case(ready: Prepared, folder: Path) -> dict[str, Any]:
    """Fit a case's attack into a folder of its own and return what its manifest says of the result.

    Raises:
        BadInputError: there is no public text, the attack names an inverter already, or the folder holds another one.
    """
    check_told(ready.case)
    if ready.public is None:
        raise BadInputError("fitting takes what the attacker has: add a [public] table")
    key = _key(ready)
    note = folder / _KEY
    try:
        before = note.read_text(encoding="utf8", errors="replace") if note.is_file() else None
        if before not in (None, key) or (before is None and (folder / MANIFEST).exists()):
            raise BadInputError(f"{folder} holds what another case learned; choose another --out or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(note) as draft:
            draft.write_text(key, encoding="utf8")
    except OSError as error:
        raise BadInputError(f"cannot write {folder} ({error.strerror}); choose another --out") from None
    if not (folder / MANIFEST).is_file():
        _fit(ready, folder)
    with broken_by(str(folder / MANIFEST)):
        about = dict(json.loads((folder / MANIFEST).read_text(encoding="utf8")))
    return {key: about[key] for key in _FACTS if key in about}


def fitted(ready: Prepared, folder: Path) -> Prepared:
    """Return a case whose attack is ready to run: fitted before, by all that decides the result, or now.

    Args:
        ready: the prepared case.
        folder: holds a folder a fit, named by a hash of what it depends on.
    """
    check_told(ready.case)
    if not ready.attack.unfitted:
        return ready
    if ready.public is None:
        raise BadInputError(f"attack '{ready.attack.name}' learns from public data: add a [public] table")
    place = folder / _key(ready)
    attack = ready.attack.fitted_in(place) if (place / MANIFEST).is_file() else _fit(ready, place)
    return replace(ready, attack=attack)


def _fit(ready: Prepared, folder: Path) -> Attack[Any]:
    case = ready.case
    return fit(ready.attack, ready.client, ready.selection, ready.public, case.data.batch_size, case.seed, folder)


def _key(ready: Prepared) -> str:
    """Return a hash of all that decides what is learned."""
    facts = {
        "form": _FORM,
        "target": target_of(ready.client, ready.selection, ready.case.data.batch_size).model_dump(mode="json"),
        "attack": describe(ready.attack),
        "public": digest_of(ready.public),
        "seed": ready.case.seed,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def digest_of(public: PublicData) -> str:
    """Return the sha256 of all that the attacker has."""
    digest = hashlib.sha256()
    for tensor in public.parts():
        if tensor is not None:
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
