"""What decides a model: its name, task, adapters and loss, enough to get exactly it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

TASKS: dict[str, str] = {"classification": "text", "causal-lm": "text", "image-classification": "images"}
"""The kind of data of each task; a new kind adds its own."""


def kind_of(task: str) -> str:
    """Return the kind of data of a task.

    Raises:
        ValueError: there is no such task.
    """
    if task not in TASKS:
        *most, last = (f"'{name}'" for name in TASKS)
        raise ValueError(f"Input should be {', '.join(most)} or {last}")
    return TASKS[task]


def _known(task: str) -> str:
    kind_of(task)
    return task


Task = Annotated[str, AfterValidator(_known)]
"""Name of a task, checked where it is read."""

_GROUPS = {"attention": "qkvo", "all-linear": "qkvofp"}


def roles_of(modules: str) -> tuple[str, ...]:
    """Return the roles of the matrices that have adapters.

    Raises:
        ValueError: what is named is neither a group of roles nor roles.
    """
    roles = tuple(_GROUPS.get(modules) or modules.split(","))
    if not set(roles) <= set(_GROUPS["all-linear"]):
        raise ValueError('Input should be "attention", "all-linear", or roles of q, k, v, o, f, p, as "q,v"')
    return roles


def _named(modules: str) -> str:
    roles_of(modules)
    return modules


Modules = Annotated[str, AfterValidator(_named)]
"""Which matrices have adapters, checked where it is read."""
Loss = Literal["cross-entropy", "squared"]
"""What the client minimizes: see `ModelSpec`."""


@dataclass(frozen=True)
class ModelSpec:
    """How to get exactly this model again, and how to name it in every output.

    Args:
        name: what the user wrote: an embedded name, hub id, folder, or "random:SHAPE".
        task: one of `TASKS`.
        labels: number of classes (classification).
        seed: seed of what is random in it: the fresh classification head, or all weights of a random one.
        layers: keep only the first blocks; None keeps all.
        random_weights: True when no weight is trained; said wherever the model is named.
        lora: adapters that are trained in place of the model; None for none.
        loss: what the client minimizes: "cross-entropy", or the "squared" distance of the logits from one-hot labels.
        loaded: read only so many first blocks: what lies behind them cannot be computed. None reads all.
        image: channels, height and width of the images; None of text.
        weights: "bfloat16" rounds all weights to what fits in it; the model still computes in float32.
    """

    name: str
    task: Task = "classification"
    labels: int = 2
    seed: int = 0
    layers: int | None = None
    random_weights: bool = False
    lora: Lora | None = None
    loss: Loss = "cross-entropy"
    loaded: int | None = None
    image: tuple[int, int, int] | None = None
    weights: Literal["float32", "bfloat16"] = "float32"

    @property
    def title(self) -> str:
        """The name shown to people."""
        depth = f", first {self.layers} blocks" if self.layers is not None else ""
        adapters = f", {self.lora.title}" if self.lora is not None else ""
        depth += f", {self.loaded} blocks of it loaded" if self.loaded is not None else ""
        depth += f", weights in {self.weights}" if self.weights != "float32" else ""
        return self.name + depth + adapters + (" (random weights)" if self.random_weights else "")


@dataclass(frozen=True)
class Lora:
    """Adapters: y = W x + alpha / rank B A x, of which A [rank, in], B [out, rank] and the task head are trained.

    Args:
        rank: r.
        alpha: scale; None takes 2 r.
        modules: "attention" (q, k, v, o), "all-linear" (and the feed-forward), or roles, as "q,v".
        blocks: that have adapters; None for all.
        dropout: of what enters the adapters, where the client trains with dropout.
        warmup: steps of AdamW on rows that are in no audited batch, before the update. peft begins with B = 0, and
            then A has no gradient: a first update gives nothing away that later ones do not.
        folder: of an adapter that was trained elsewhere, as peft saves it, at whose weights the update is made; it
            says rank, alpha and modules itself.
    """

    rank: int = 8
    alpha: float | None = None
    modules: str = "attention"
    blocks: tuple[int, ...] | None = None
    dropout: float = 0.0
    warmup: int = 0
    folder: str | None = None

    @property
    def title(self) -> str:
        """The name shown to people."""
        if self.folder is not None:
            return "LoRA as it was saved" + (f", after {self.warmup} steps" if self.warmup else "")
        after = f", after {self.warmup} steps" if self.warmup else ""
        where = "" if self.blocks is None else f" of block {', '.join(map(str, self.blocks))}"
        dropped = f", adapter dropout {self.dropout:g}" if self.dropout else ""
        return f"LoRA r = {self.rank} on {self.modules}{where}{dropped}{after}"
