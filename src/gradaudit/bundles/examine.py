"""Attack a bundle without truth: what `gradaudit attack` prints."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradaudit.attacks.base import ModelChangedError
from gradaudit.audit.prepare import able, uncountered
from gradaudit.bundles.bundle import load_bundle, told_defenses
from gradaudit.case import parse_value
from gradaudit.data.png import png
from gradaudit.errors import AuditError, BadInputError, BrokenDownError, NotSupportedError
from gradaudit.models.base import TextModel
from gradaudit.models.images import ImageModel
from gradaudit.progress import StoppedError
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Knowledge, Reconstruction

WITH_DROPOUT = "decode"
"""What to try where an attack does not reckon with dropout."""
USUAL_ATTACK = "auto"
"""The attack where none is named."""


@dataclass(frozen=True)
class ShownWord:
    """A word that an attack names.

    Args:
        text: as the tokenizer writes it.
        id: of the token.
        steps: local steps that held it, counted from 0; None where they are not told.
        certain: nothing else explains the update.
    """

    text: str
    id: int
    steps: tuple[int, ...] | None
    certain: bool


@dataclass(frozen=True)
class Examination:
    """What an attack read out of a bundle; nobody knows how much of it is right.

    Args:
        attack: its name.
        model: title of the model.
        knowledge: what the attacker was given.
        texts: recovered sentences; none of images.
        ids: their token ids.
        labels, certificates, notes, details: of the reconstruction.
        by: name of the attack that read it, where `attack` tries several.
        warnings: what preflight noticed.
        seconds: wall time of the attack.
        images: recovered images as base64 PNG; None of text.
        words: words of the batch that the attack names, beside what is in sentences; None where it names none.
    """

    attack: str
    model: str
    knowledge: Knowledge
    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...] | None
    certificates: tuple[str, ...] | None
    notes: tuple[str, ...]
    details: dict[str, Any]
    warnings: tuple[str, ...]
    seconds: float
    images: tuple[str, ...] | None = None
    words: tuple[ShownWord, ...] | None = None
    by: str | None = None

    @property
    def title(self) -> str:
        """The attack's name, and that of the one that read it where several were tried."""
        return self.attack if self.by is None else f"{self.attack} ({self.by})"

    @property
    def count(self) -> int:
        """How many sentences or images were read."""
        return len(self.texts) if self.images is None else len(self.images)

    @property
    def named(self) -> int:
        """How many words were named, beside sentences."""
        return len(self.words or ())

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data; `scores` is null because there is no truth to score against."""
        return {
            "attack": self.attack,
            "by": self.by,
            "model": self.model,
            "knowledge": self.knowledge.given(),
            "texts": list(self.texts),
            "ids": [list(row) for row in self.ids],
            "images": None if self.images is None else list(self.images),
            "words": None if self.words is None else [asdict(word) for word in self.words],
            "labels": self.labels,
            "certificates": self.certificates,
            "notes": list(self.notes),
            "details": self.details,
            "warnings": list(self.warnings),
            "seconds": self.seconds,
            "scores": None,
            "flags": ["no-truth"],
            "error": None,
        }


def set_up(attack: str, settings: Sequence[str]) -> Any:
    """Return an attack with some of its fields set.

    Args:
        attack: its name.
        settings: "field=value" overrides of its fields.

    Raises:
        BadInputError: no such attack, field or value.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise BadInputError(f"--set takes field=value, for example steps=100; got '{setting}'")
        values[key.strip().removeprefix("attack.")] = parse_value(text)
    return build("attack", attack, values)


def examine(
    folder: Path,
    attack: str | None,
    settings: Sequence[str],
    selection: str,
    model: str | None,
    seed: int,
    device: torch.device,
    blocks: int | None = None,
    known: tuple[tuple[int, ...], ...] = (),
) -> Examination:
    """Check a bundle and attack it.

    Args:
        folder: the bundle.
        attack: name of the attack; None for `USUAL_ATTACK`.
        settings: "field=value" overrides of its fields.
        selection: which gradients it sees.
        model: a model name in place of the bundle's.
        seed: of its random stream.
        device: where it runs.
        blocks: how many of the model's first blocks to load; None for all.
        known: sentences read from other updates of the same client.

    Raises:
        BadInputError: anything about the bundle or the names that does not fit, before any attack starts.
        NotSupportedError: the update is behind a defense to which the attack has no counter.
        BrokenDownError: the attack ended in an error of its own.
        StoppedError: Ctrl-C, with the examination of what was read until then.
    """
    attack = attack or USUAL_ATTACK
    built = set_up(attack, settings)
    bundle = load_bundle(folder, device, model, blocks)
    seen = replace(bundle.observation(Selection(selection)), known=known)
    told, size = told_defenses(seen.knowledge), seen.knowledge.batch_size
    without = uncountered(built, told, bundle.model, size)
    if without is not None:
        raise NotSupportedError(
            f"attack '{attack}' has no counter to '{without}' here, which the bundle says acts on the update; "
            f"{able(told, bundle.model, size)}"
        )
    given = (f"{len(known)} sentences read from other rounds were given to the attacker",) if known else ()
    began, stopped = time.perf_counter(), False
    try:
        found = built(seen, stream(seed, "attack", 0))
    except StoppedError as stop:
        found, stopped = stop.found, True
    except (AuditError, MemoryError, ModelChangedError):
        raise
    except Exception as problem:  # as of a batch of `run`: whatever a strange update does to an attack
        said = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
        raise BrokenDownError(f"attack '{attack}' broke down ({said}), which is no sign of safety") from problem
    seconds = time.perf_counter() - began
    read = Examination(
        attack=attack,
        model=bundle.model.spec.title,
        knowledge=seen.knowledge,
        texts=tuple(bundle.model.decode(row) for row in found.sequences) if isinstance(bundle.model, TextModel) else (),
        ids=found.sequences,
        labels=found.labels,
        certificates=found.certificates,
        notes=(
            *(("stopped with Ctrl-C: what was read until then",) if stopped else ()),
            *given,
            *_unread_dropout(attack, built.models_dropout, seen.knowledge),
            *found.notes,
        ),
        details=dict(found.details),
        warnings=tuple(f.text for f in bundle.findings),
        seconds=seconds,
        images=tuple(png(image) for image in _shown(found)) if isinstance(bundle.model, ImageModel) else None,
        words=_named(bundle.model, found),
        by=found.by,
    )
    if stopped:
        raise StoppedError(read)
    return read


def _named(model: object, found: Reconstruction) -> tuple[ShownWord, ...] | None:
    """Return the words that were named, with their texts."""
    if not isinstance(model, TextModel) or found.words is None:
        return None
    return tuple(ShownWord(model.pieces([w.token])[0], w.token, w.steps, w.certain) for w in found.words)


def _unread_dropout(attack: str, reckons: bool, known: Knowledge) -> tuple[str, ...]:
    """Return the note that dropout was on where an attack does not reckon with it; else nothing."""
    if not known.dropout or reckons:
        return ()
    said = f"dropout was on, and '{attack}' assumes that it is off: finding little does not mean that this is safe"
    return (f"{said}; try --attack {WITH_DROPOUT}",)


def _shown(found: Reconstruction) -> list[Tensor]:
    """Return the recovered images that can be shown: NaN is no picture."""
    images = () if found.images is None else found.images.detach().cpu()
    return [image for image in images if image.isfinite().all()]
