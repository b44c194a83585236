"""The data that flows through an audit: Batch, Update, Knowledge, Observation, Reconstruction.

Data flows one way, through a wall. A `Batch` of text or an `ImageBatch` is private: only the client and the judge may
hold one. An attack gets an `Observation` and returns a `Reconstruction`; neither can carry a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self

from torch import Tensor
from typing_extensions import TypeVar

if TYPE_CHECKING:
    from gradaudit.models.base import Model, TextModel
    from gradaudit.models.views import View

UpdateKind = Literal["gradient", "delta"]
Precision = Literal["fp32", "bf16", "fp16", "bf16-weights"]
_LATER = {"later": True}
"""Marks fields that were added after cases were run; see `LocalTraining.described`."""
M_co = TypeVar("M_co", bound="Model", covariant=True, default="TextModel")
"""Kind of the model that an observation is of: of text where nothing else is said."""


class Private(Protocol):
    """A private batch of any kind of data. Never crosses the wall."""

    @property
    def labels(self) -> Tensor | None:
        """[B] class labels; None where there are none."""

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """How long each example is; None where all are of one size."""

    def __len__(self) -> int:
        """How many examples it has."""

    def take(self, rows: Tensor) -> Self:
        """Return some of the examples, by number and in that order."""


@dataclass(frozen=True)
class Batch:
    """One private batch of text, as the client trains on it. Never crosses the wall.

    Args:
        ids: [B, T] token ids, padded on the right.
        mask: [B, T] bool, True where a token is real.
        labels: [B] class labels; None for causal language modeling, where the text is its own label.
        texts: the B original strings, for the judge's sensitive spans.
        truncated: how many of the texts were cut to the model's length.
    """

    ids: Tensor
    mask: Tensor
    labels: Tensor | None
    texts: tuple[str, ...]
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def sequences(self) -> list[list[int]]:
        """Return each sentence's token ids without padding."""
        return [row[keep].tolist() for row, keep in zip(self.ids, self.mask, strict=True)]

    def take(self, rows: Tensor) -> Batch:
        """Return some of the sentences, by number and in that order."""
        labels = None if self.labels is None else self.labels[rows]
        texts = tuple(self.texts[int(n)] for n in rows) if self.texts else ()
        return Batch(self.ids[rows], self.mask[rows], labels, texts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Real tokens of each sentence."""
        return tuple(self.mask.sum(1).tolist())

    @property
    def tokens(self) -> int:
        """How many real tokens the batch has, special tokens included (b in the literature)."""
        return int(self.mask.sum())


@dataclass(frozen=True)
class ImageBatch:
    """One private batch of images, as the client trains on it. Never crosses the wall.

    Args:
        images: [B, C, H, W] in 0 to 1.
        labels: [B] class labels.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: Tensor) -> ImageBatch:
        """Return some of the images, by number and in that order."""
        return ImageBatch(self.images[rows], self.labels[rows])

    @property
    def sizes(self) -> None:
        """Images are all of one size."""
        return None


class PublicData(Protocol):
    """Data of any kind that the attacker has from elsewhere; nothing of it is in an audited batch."""

    @property
    def where(self) -> str:
        """Their source in words."""

    def __len__(self) -> int:
        """How many examples."""

    def parts(self) -> tuple[Tensor | None, ...]:
        """Return all that decides what is learned from them."""


@dataclass(frozen=True)
class PublicImages:
    """Images that the attacker has from elsewhere; none of them is in an audited batch.

    Args:
        images: [N, C, H, W] in 0 to 1.
        labels: [N] class labels.
        where: their source in words, for records and reports.
        sha256: of the images and labels.
    """

    images: Tensor
    labels: Tensor
    where: str
    sha256: str

    def __len__(self) -> int:
        return len(self.images)

    def parts(self) -> tuple[Tensor, ...]:
        """Return all that decides what is learned from them."""
        return self.images, self.labels


@dataclass(frozen=True)
class LocalTraining:
    """How the client turns a batch into an update.

    Args:
        optimizer: "none" sends one gradient (FedSGD); "sgd", "adam" and "adamw" train locally from a fresh state and
            send the weight change.
        learning_rate: step size of the local optimizer.
        epochs: passes over the client's batch.
        minibatch: sentences a pass through the model; None takes the whole batch.
        weight_decay: as torch's optimizers have it: decoupled for AdamW, added to the gradient for the others; 0 by
            default so that the change is the gradients' alone.
        momentum: of SGD, without dampening.
        betas: Adam's and AdamW's.
        eps: Adam's and AdamW's.
        clip_norm: largest norm of a step's whole gradient; None does not clip. The transformers Trainer takes 1.0.
        schedule: "linear" lowers the learning rate from step to step, to 0 behind the last (the Trainer's default).
        accumulate: minibatches whose mean gradient makes one step.
        precision: "bf16" and "fp16" run the model under torch.autocast, weights and optimizer in float32;
            "bf16-weights" has all in bfloat16: weights, gradients and the optimizer's state.
        label_smoothing: share of each label that is spread evenly over all classes, as torch's cross-entropy has it.
    """

    optimizer: Literal["none", "sgd", "adam", "adamw"] = "none"
    learning_rate: float = 1e-4
    epochs: int = 1
    minibatch: int | None = None
    weight_decay: float = 0.0
    momentum: float = field(default=0.0, metadata=_LATER)
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata=_LATER)
    eps: float = field(default=1e-8, metadata=_LATER)
    clip_norm: float | None = field(default=None, metadata=_LATER)
    schedule: Literal["constant", "linear"] = field(default="constant", metadata=_LATER)
    accumulate: int = field(default=1, metadata=_LATER)
    precision: Precision = field(default="fp32", metadata=_LATER)
    label_smoothing: float = field(default=0.0, metadata=_LATER)

    def steps(self, batch_size: int) -> int:
        """Return how many optimizer steps a batch of this size takes."""
        per_epoch = -(-batch_size // (self.minibatch or batch_size))
        return -(-self.epochs * per_epoch // self.accumulate) if self.optimizer != "none" else 1

    def rates(self, steps: int) -> tuple[float, ...]:
        """Return the learning rate of each of so many steps."""
        falling = self.schedule == "linear"
        return tuple(self.learning_rate * ((steps - at) / steps if falling else 1.0) for at in range(steps))

    def mean_rate(self, steps: int) -> float:
        """Return the mean of `rates`."""
        return self.learning_rate * ((steps + 1) / (2 * steps) if self.schedule == "linear" else 1.0)

    @property
    def descends(self) -> bool:
        """Whether every step is plain SGD's: the same rate times one minibatch's gradient."""
        return self.optimizer == "sgd" and self == LocalTraining("sgd", self.learning_rate, self.epochs, self.minibatch)

    @property
    def one_gradient(self) -> bool:
        """Whether one gradient of the plain loss in full precision is sent."""
        return self.optimizer == "none" and self.precision == "fp32" and not self.label_smoothing

    def described(self) -> dict[str, Any]:
        """Return the fields in plain types; those that were added later only where they are set."""
        own = asdict(self)
        return {f.name: own[f.name] for f in fields(self) if not f.metadata or own[f.name] != f.default}


@dataclass(frozen=True)
class Update:
    """What leaves the client: one gradient, or the weight change of several local steps.

    Args:
        tensors: by parameter name of the model; frozen parameters are absent.
        kind: "gradient" or "delta" (weights after minus weights before).
        training: how it was made.
        dropout: dropout rate in force while training, 0.0 when it was off.
        frozen: names of the parameters that were not trained.
        defenses: what acted on it, in order, as (name, fields) descriptions.
    """

    tensors: Mapping[str, Tensor]
    kind: UpdateKind
    training: LocalTraining
    dropout: float
    frozen: tuple[str, ...] = ()
    defenses: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Knowledge:
    """What the attacker is *given* beside the model and the tensors; None means unknown. Printed in every report.

    Args:
        batch_size: number of sentences.
        lengths: real tokens of each sentence, special tokens included.
        longest: real tokens of the longest sentence.
        labels: class label of each sentence.
        training: the client's optimizer, learning rate, epochs and minibatch.
        dropout: the dropout rate in force (0.0: off).
        defenses: descriptions of the defenses in force; empty: known to be none.
        public: data from elsewhere that the attacker has, in words (the data is in the observation).
    """

    batch_size: int | None = None
    lengths: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None
    training: LocalTraining | None = None
    dropout: float | None = None
    defenses: tuple[Mapping[str, Any], ...] | None = None
    longest: int | None = None
    public: str | None = None

    @property
    def steps(self) -> int | None:
        """How many local steps were taken; None where that is not known."""
        how, size = self.training, self.batch_size
        if how is None or (size is None and how.minibatch is not None):
            return None
        return how.steps(size or 1)

    def given(self) -> dict[str, Any]:
        """Return what is known, by name, in plain types."""
        known = asdict(self) | {"training": None if self.training is None else self.training.described()}
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class Given:
    """Which facts the attacker is given; the client fills in their values (see `Knowledge`).

    The defaults are what an honest-but-curious server has: it set the training up, and does not know the data.
    """

    batch_size: bool = True
    lengths: bool = False
    labels: bool = False
    training: bool = True
    dropout: bool = True
    defenses: bool = True
    longest: bool = False


@dataclass(frozen=True)
class Observation(Generic[M_co]):
    """All that an attack may see: the model, the selected tensors and the attacker's knowledge.

    Args:
        model: the public model, with the weights at which the update was made.
        tensors: by view name ("0.q", or a parameter's own name); shapes as `views` gives them.
        views: where each tensor lies in the model's parameters.
        kind: "gradient" or "delta".
        knowledge: what the attacker is given.
        selection: the expression that chose the tensors.
        known: token ids of sentences that were read from other updates of the same client, and may be in this one.
        public: images from elsewhere that the attacker has; None for none.
    """

    model: M_co
    tensors: Mapping[str, Tensor]
    views: Mapping[str, View]
    kind: UpdateKind
    knowledge: Knowledge = field(default_factory=Knowledge)
    selection: str = "all"
    known: tuple[tuple[int, ...], ...] = ()
    public: PublicImages | None = None

    def role(self, layer: int, role: str) -> list[Tensor]:
        """Return the seen gradients of one role of one block, each [out, in]; empty when not shared.

        A role is a view: it is found whether it was shared by itself or inside a whole parameter.
        """
        found = []
        for view in self.model.views(layer, role):
            if view.name in self.tensors:
                found.append(self.tensors[view.name])
            elif view.parameter in self.tensors:
                found.append(view(self.tensors[view.parameter]))
        return found


@dataclass(frozen=True)
class NamedWord:
    """A word that an update shows.

    Args:
        token: its id.
        steps: local steps, counted from 0, whose minibatch held it; None where they are not told.
        certain: nothing else explains the update, and that was checked without the truth.
    """

    token: int
    steps: tuple[int, ...] | None = None
    certain: bool = False


@dataclass(frozen=True)
class Reconstruction:
    """What an attack recovered.

    Args:
        sequences: token ids of each recovered sentence, special tokens included, no padding; may hold fewer or more
            sentences than the batch, in any order.
        labels: recovered labels, one a sentence, or None.
        certificates: "proven", "likely" or "guess" a sentence, computed without the truth; None when not computed.
        notes: one-sentence remarks for the report ("not identifiable: ...").
        details: plain numbers the attack reports (loss, candidates, ranks), for the record.
        images: recovered images [n, C, H, W] in 0 to 1, fewer or more than the batch, in any order; None of text.
        words: words of the batch, with or without their place in a sentence; None where the attack names none.
        by: name of the attack that found it, where one that tries several was run; None: the one that was run.
    """

    sequences: tuple[tuple[int, ...], ...] = ()
    labels: tuple[int, ...] | None = None
    certificates: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    images: Tensor | None = None
    words: tuple[NamedWord, ...] | None = None
    by: str | None = None

    @property
    def count(self) -> int:
        """How many sentences or images were recovered."""
        return len(self.sequences) if self.images is None else len(self.images)
