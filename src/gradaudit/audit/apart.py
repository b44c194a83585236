"""Attacks of other packages, run in a program of their own that gets the observation and nothing else.

No frame, reference or module of that program leads to the truth: it was never there. What crosses are two pipes, of
JSON and safetensors. It is no sandbox: it runs as the same user, who may read the same files.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import IO, Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load, save
from torch import Tensor

import gradaudit.audit.images
import gradaudit.audit.text  # noqa: F401 - each registers how its models are loaded
from gradaudit import errors
from gradaudit.attacks.base import Attack, ModelChangedError
from gradaudit.audit.loading import MODELS
from gradaudit.models.base import Model
from gradaudit.models.spec import ModelSpec, kind_of
from gradaudit.registry import build, describe
from gradaudit.selection import Selection
from gradaudit.types import Knowledge, NamedWord, Observation, PublicImages, Reconstruction

_SENT, _WEIGHT, _PUBLIC, _CHANCE, _FOUND = "sent ", "weight ", "public ", "chance", "images"
"""What a tensor on the way is: the first three are followed by its name."""
_ENDING = 5
"""Seconds that a program whose pipe broke has to end by itself: it only has to close its files."""
_ERRORS: dict[str, type[Exception]] = {
    cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.AuditError)
} | {ModelChangedError.__name__: ModelChangedError}


def run_apart(attack: Attack[Any], seen: Observation[Any], rng: torch.Generator) -> Reconstruction:
    """Return what an attack recovers in a program of its own, which goes on to the next batch.

    Args:
        attack: one that the registry knows by name in every program; its fields are plain data.
        seen: all that it may see.
        rng: its random stream.

    Raises:
        BrokenDownError: the program ended.
        Exception: what the attack raised, an error of ours as what it is.
    """
    program = _program()
    try:
        answer, found = program.ask(attack, seen, rng)
    except BaseException as problem:  # nobody knows where in a message the pipes are
        _program.cache_clear()
        code = program.end()
        if not isinstance(problem, EOFError | OSError | ValueError):
            raise
        raise errors.BrokenDownError(f"attack '{attack.name}' ended the program that ran it (code {code})") from None
    if "error" in answer:
        program.forget()
        module, kind, told = answer["error"]
        ours = _ERRORS.get(kind) if module.startswith("gradaudit.") else None
        raise ours(told) if ours else type(kind, (RuntimeError,), {"__module__": module})(told)
    return _read(answer, found.get(_FOUND))


class _OtherProgram:
    """The other program; its model is sent once."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))  # a plugin is found there as it is here
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path})  # fmt: skip
        self._model: tuple[ModelSpec, str] | None = None
        atexit.register(self.process.kill)

    def end(self) -> int:
        """End it, where it has not ended by itself, and return its exit code."""
        try:
            return self.process.wait(timeout=_ENDING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def forget(self) -> None:
        """Send the model again next time: an attack that failed may have written into it."""
        self._model = None

    def ask(
        self, attack: Attack[Any], seen: Observation[Any], rng: torch.Generator
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Send an observation and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        model, public = seen.model, seen.public
        said = {
            "attack": describe(attack), "kind": seen.kind, "knowledge": asdict(seen.knowledge), "known": seen.known,
            "selection": seen.selection, "device": str(model.device), "threads": torch.get_num_threads(),
        }  # fmt: skip
        tensors = {_CHANCE: rng.get_state()} | {_SENT + name: value for name, value in seen.tensors.items()}
        if public is not None:
            said["public"] = {"where": public.where, "sha256": public.sha256}
            tensors |= {_PUBLIC + "images": public.images, _PUBLIC + "labels": public.labels}
        here = (model.spec, model.fingerprint())
        if self._model != here:
            said["model"] = asdict(model.spec)
            tensors |= {_WEIGHT + name: value for name, value in model.parameters().items()}
        _send(self.process.stdin, said, tensors)
        self._model = here
        return _receive(self.process.stdout)


@cache
def _program() -> _OtherProgram:
    return _OtherProgram()


def _send(pipe: IO[bytes], said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    for part in (json.dumps(said, default=str).encode(), save(held)):
        pipe.write(len(part).to_bytes(8, "big"))
        pipe.write(part)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what was sent.

    Raises:
        EOFError: the other program ended.
    """
    parts = []
    for _ in range(2):
        size = pipe.read(8)
        part = pipe.read(int.from_bytes(size, "big")) if len(size) == 8 else b""
        if not part:
            raise EOFError
        parts.append(part)
    return json.loads(parts[0]), load(parts[1])


def _read(answer: Mapping[str, Any], found: Tensor | None) -> Reconstruction:
    """Return the reconstruction that plain data tell."""
    words = answer["words"]
    plain = {name: None if answer[name] is None else tuple(answer[name]) for name in ("labels", "certificates")}
    return Reconstruction(
        sequences=tuple(tuple(one) for one in answer["sequences"]),
        notes=tuple(answer["notes"]),
        details=answer["details"],
        images=found,
        words=None if words is None else tuple(TypeAdapter(NamedWord).validate_python(word) for word in words),
        by=answer["by"],
        **plain,
    )


# the other program


def _loaded(said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Model:
    """Return the model that is attacked, with the weights that were sent."""
    spec = TypeAdapter(ModelSpec).validate_python(said["model"])
    model = MODELS[kind_of(spec.task)](spec, torch.device(said["device"]))
    with torch.no_grad():
        for name, weight in model.parameters().items():
            weight.copy_(tensors[_WEIGHT + name])
    model.weights_changed()
    return model


def _observed(model: Model, said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Observation[Model]:
    sent = {n.removeprefix(_SENT): t.to(model.device) for n, t in tensors.items() if n.startswith(_SENT)}
    shown = None
    if "public" in said:
        images, labels = (tensors[_PUBLIC + name].to(model.device) for name in ("images", "labels"))
        shown = PublicImages(images, labels, **said["public"])
    return Observation(
        model=model,
        tensors=sent,
        views={name: view for name, view in Selection(said["selection"]).views(model).items() if name in sent},
        kind=said["kind"],
        knowledge=TypeAdapter(Knowledge).validate_python(said["knowledge"]),
        selection=said["selection"],
        known=tuple(tuple(one) for one in said["known"]),
        public=shown,
    )


def main() -> None:
    """Attack what comes in until nothing more does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a plugin prints is no answer
    model: Model | None = None
    while True:
        try:
            said, tensors = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            torch.set_num_threads(said["threads"])
            if "model" in said:
                model = _loaded(said, tensors)
            assert model is not None
            rng = torch.Generator()
            rng.set_state(tensors[_CHANCE])
            fields = {name: value for name, value in said["attack"].items() if name != "name"}
            attack = build("attack", said["attack"]["name"], fields)
            found: Reconstruction = attack(_observed(model, said, tensors), rng)
            _send(out, asdict(replace(found, images=None)), {} if found.images is None else {_FOUND: found.images})
        except Exception as problem:  # the program that asked decides what it means
            _send(out, {"error": [type(problem).__module__, type(problem).__name__, str(problem)]}, {})


if __name__ == "__main__":
    main()
