"""What an attack is: a frozen dataclass whose fields are its hyperparameters and whose `run` sees an Observation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, final

import torch
from typing_extensions import TypeVar

from gradaudit.defense_traits import OF_MEANS, Trait, traits_of, with_trait
from gradaudit.errors import BadInputError, MissingKnowledgeError, NotSupportedError
from gradaudit.leakage.guess_back import guess_back
from gradaudit.leakage.segments import UNREAD, second_segments
from gradaudit.models.base import Model, TextModel
from gradaudit.models.state import digest_of
from gradaudit.progress import answering
from gradaudit.types import Observation, Reconstruction

if TYPE_CHECKING:
    from gradaudit.learned.manifest import Target

M = TypeVar("M", bound=Model, default=TextModel)


class Attack(ABC, Generic[M]):
    """Base of every attack. Subclasses are frozen dataclasses, registered with `@register`, and write only `run`.

    `Attack` attacks models of text, `Attack[ImageModel]` those of images and `Attack[Model]` both; `tasks` says so too.
    """

    kind: ClassVar[str] = "attack"
    name: ClassVar[str]
    source: ClassVar[str]
    """Paper, section, and where this implementation differs."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Names of `Knowledge` fields that must be given."""
    tasks: ClassVar[tuple[str, ...]] = ("classification", "causal-lm")
    handles: ClassVar[frozenset[Trait]] = frozenset()
    """Traits of the defenses that the attack reckons with when told of them. Told of others on an update or on
    examples' gradients it is not run; not told, or with others on the text, the record gets a flag."""
    countered: ClassVar[frozenset[Trait]] = frozenset()
    """Those of `handles` that the attack does not reckon with when its field `counter` is off."""
    takes_any: ClassVar[bool] = False
    """True when it need not be told: it learned through the defense, or looks at no update."""
    models_dropout: ClassVar[bool] = False
    """True when the attack reckons with dropout; otherwise an update made with dropout on gets a flag."""
    exact_on_deltas: ClassVar[bool] = False
    """True when a weight change of several steps is read as what it is; otherwise it gets a flag."""
    anytime: ClassVar[bool] = False
    """True when what the attack has before its end is an answer of its kind. `auto` runs it however long all of it
    would take, for half of the time left where another attack fits in the other half."""
    textless: ClassVar[bool] = False
    """True when notes, details and errors hold nothing of what was recovered: only then records of an attack from
    elsewhere keep them. All attacks of this package are so."""

    def reckons_with(self, defense: str, model: Model | None = None, batch_size: int | None = None) -> bool:
        """Return whether the attack, as it is set, acts on knowing of a defense, or need not know of it.

        Args:
            defense: its name.
            model: the model that is attacked; None for any.
            batch_size: sentences; None where they are not known.
        """
        return traits_of(defense, batch_size) <= self.handled(model) | {"stand-ins"}

    def handled(self, model: Model | None) -> frozenset[Trait]:
        """Return the traits that the attack handles as it is set; `handles` unless a field or the model says otherwise.

        Args:
            model: the model that is attacked; None for any.
        """
        return self.handles if getattr(self, "counter", True) else self.handles - self.countered

    def must_be_told(self, defense: str) -> bool:
        """Return whether the attack can reckon with a defense only if it was told of it."""
        return bool(traits_of(defense)) and not self.takes_any

    def reckons_with_means(self, defense: str) -> bool:
        """Return whether what the attack takes a defense to do holds of the mean of several clients, each defended."""
        return not self.must_be_told(defense) or traits_of(defense) <= OF_MEANS

    @final
    def __call__(self, seen: Observation[M], rng: torch.Generator) -> Reconstruction:
        """Check what the attack needs, run it, and leave the model as it was, even after an error.

        Args:
            seen: all that the attacker may see.
            rng: the attack's own random stream (on the CPU).

        Raises:
            MissingKnowledgeError: something in `needs` was not given.
            NotSupportedError: the task, model or update is outside what the attack can do.
            StoppedError: Ctrl-C, with what the attack had read until then.
            ModelChangedError: the attack wrote into the model or its hooks, mode or flags; all but written weights are
                put back.
        """
        missing = [need for need in self.needs if getattr(seen.knowledge, need) is None]
        if missing:
            raise MissingKnowledgeError(
                f"attack '{self.name}' must be given {', '.join(missing)}; set it in [knowledge] or choose an attack "
                "that does without"
            )
        if not self.takes(seen.model.spec.task):
            raise NotSupportedError(f"attack '{self.name}' does not support task '{seen.model.spec.task}'")
        before = _digests(seen)
        restore = seen.model.remember()
        broken: BaseException | None = None
        try:
            with answering(lambda had: self._answer(seen, had) if isinstance(had, Reconstruction) else None):
                return self._answer(seen, self.run(seen, rng))
        except BaseException as error:
            broken = error
            raise
        finally:
            mended = restore()
            if mended or _digests(seen) != before:
                raise ModelChangedError(
                    f"attack '{self.name}' changed the model; an attack must leave it as it was"
                ) from broken

    def _answer(self, seen: Observation[M], found: Reconstruction) -> Reconstruction:
        return no_more_than(seen.knowledge.batch_size, self._finished(seen, found))

    def _finished(self, seen: Observation[M], found: Reconstruction) -> Reconstruction:
        """Return what was read with words in place of stand-ins that were told, and a note on what no attack reads."""
        model, told = seen.model, with_trait(seen.knowledge.defenses, "stand-ins")
        if not isinstance(model, TextModel) or self.takes_any:
            return found
        if UNREAD not in found.notes and second_segments(model, seen.tensors):
            found = replace(found, notes=(*found.notes, UNREAD))
        return found if told is None else guess_back(model, found, told)

    @abstractmethod
    def run(self, seen: Observation[M], rng: torch.Generator) -> Reconstruction:
        """Recover what can be recovered.

        Args:
            seen: all that the attacker may see.
            rng: the attack's own random stream (on the CPU); draw nothing from elsewhere.
        """

    def load(self, device: torch.device) -> None:
        """Load what the attack reads beside the update, so that a wrong name ends a run before its first batch.

        Args:
            device: where it is to lie.

        Raises:
            BadInputError: it cannot be read.
        """

    @classmethod
    def shares_no_text(cls) -> bool:
        """Return whether notes, details and errors may stand in a record, which others read."""
        return cls.textless or cls.__module__.startswith("gradaudit.")

    @classmethod
    def takes(cls, task: str) -> bool:
        """Return whether the attack is for models of a task."""
        return task in cls.tasks

    @property
    def unfitted(self) -> bool:
        """Whether the attack has to learn from public text before it can run: see `fit`."""
        return False

    @property
    def seconds_at_most(self) -> float:
        """Seconds after which the attack ends a batch by itself."""
        return math.inf

    def simulated_updates(self, public: int) -> int:
        """Return how many updates of public data `fit` simulates at least, for `gradaudit check`'s estimate.

        Args:
            public: whole updates that the public data makes.
        """
        return public

    def fit(
        self, simulate: Any, public: Any, target: Target, model: Any, folder: Path, rng: torch.Generator
    ) -> Attack[M]:
        """Learn from public data and return the attack that knows what was learned.

        Args:
            simulate: replays the client, defenses included, on public data (`learned.simulated`).
            public: data that is in no audited batch: `Public` text, or `PublicImages`.
            target: the client's settings, and what is seen of its updates.
            model: the model whose updates are read.
            folder: where what was learned is written; a fit that was stopped goes on from what it kept there.
            rng: the fit's own random stream.

        Raises:
            NotSupportedError: an attack that learns nothing.
        """
        raise NotSupportedError(f"attack '{self.name}' learns nothing beforehand; run it as it is")

    def fitted_in(self, folder: Path) -> Attack[M]:
        """Return the attack that knows what an earlier `fit` wrote into a folder.

        Raises:
            NotSupportedError: an attack that learns nothing.
        """
        raise NotSupportedError(f"attack '{self.name}' learns nothing beforehand; run it as it is")

    def _at_least(self, least: int, *fields: str) -> None:
        """Check numbers (NaN is refused); for `__post_init__`.

        Raises:
            BadInputError: one of these fields is below the least.
        """
        for name in fields:
            if not getattr(self, name) >= least:
                raise BadInputError(f"attack '{self.name}': {name} must be at least {least}, got {getattr(self, name)}")

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        """Return about how many gradient evaluations one batch costs, for `gradaudit check`'s estimate.

        Args:
            batch_size: sentences.
            tokens: real tokens of the batch.
        """
        return 1


SUREST = ("proven", "likely", "guess")
"""Certificates, the surest first."""


def no_more_than(size: int | None, found: Reconstruction) -> Reconstruction:
    """Return no more examples than a batch is known to have: the surest, and of equally sure ones the first.

    Args:
        size: of the batch, where the attacker is told.
        found: what an attack returned.
    """
    if size is None or found.count <= size:
        return found
    sure = found.certificates or ("guess",) * found.count
    kept = sorted(sorted(range(found.count), key=lambda n: SUREST.index(sure[n]))[:size])
    return replace(
        found,
        sequences=tuple(found.sequences[n] for n in kept if n < len(found.sequences)),
        images=None if found.images is None else found.images[kept],
        labels=None if found.labels is None else tuple(found.labels[n] for n in kept),
        certificates=None if found.certificates is None else tuple(found.certificates[n] for n in kept),
        notes=(*found.notes, f"{found.count} guesses for a batch that is known to hold {size}: the surest were kept"),
    )


class ModelChangedError(RuntimeError):
    """An attack wrote into the model or into what it saw: every later number would be about another model."""


def _digests(seen: Observation[Model]) -> list[str]:
    """Return a sha256 of every weight and of every tensor that was seen: in-place writes of any kind change them."""
    tensors = (*seen.model.parameters().values(), *seen.tensors.values())
    with ThreadPoolExecutor() as pool:  # hashing lets go of the interpreter
        return list(pool.map(digest_of, tensors))
