"""A case: everything that decides an audit's result, as one TOML file with a content hash."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gradaudit.data.spec import LATER, DataSpec, Later, PublicSpec
from gradaudit.defenses.base import Defense
from gradaudit.errors import BadInputError, unknown_name
from gradaudit.files import read_toml, refuse_depth
from gradaudit.metrics.text import PUBLISHED
from gradaudit.models.spec import Lora, Loss, Modules, Task
from gradaudit.registry import build, describe, identity
from gradaudit.selection import Selection
from gradaudit.types import Given, LocalTraining, Precision


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClientTable(_Table):
    """[client]: how the update is made."""

    dropout: bool = Field(default=False, description="train with dropout on, at the model's configured rates")
    dropout_rate: Later[float | None] = Field(
        default=None, gt=0, lt=1, description="rate at every place that drops out, when dropout is on; else configured"
    )
    freeze: tuple[str, ...] = Field(default=(), description='not trained: "embeddings", "0-2:q,k,v", ...')
    padding: Later[Literal["right", "left"]] = Field(
        default="right", description='side of the padding; "left" for decoders'
    )
    clients: Later[int] = Field(
        default=1, ge=1, description="share each batch in equal parts; the server sees the mean of their updates alone"
    )
    optimizer: Literal["none", "sgd", "adam", "adamw"] = Field(
        default="none", description='"none" sends one gradient; the others the change of the weights'
    )
    learning_rate: float = Field(default=1e-4, gt=0, description="of the local optimizer")
    epochs: int = Field(default=1, ge=1, description="passes over the batch")
    minibatch: int | None = Field(default=None, ge=1, description="sentences a local step; all when not set")
    weight_decay: float = Field(default=0.0, ge=0, description="as the optimizer has it in torch")
    momentum: Later[float] = Field(default=0.0, ge=0, lt=1, description="SGD's")
    betas: Later[tuple[float, float]] = Field(default=(0.9, 0.999), description="Adam's and AdamW's")
    eps: Later[float] = Field(default=1e-8, gt=0, description="Adam's and AdamW's")
    clip_norm: Later[float | None] = Field(default=None, gt=0, description="largest norm of a step's gradient")
    schedule: Later[Literal["constant", "linear"]] = Field(
        default="constant", description='"linear" lowers the rate to 0 behind the last step, as transformers does'
    )
    accumulate: Later[int] = Field(default=1, ge=1, description="minibatches whose mean gradient makes one step")
    precision: Later[Precision] = Field(
        default="fp32",
        description='"bf16", "fp16": autocast, weights in float32; "bf16-weights": weights and optimizer in bfloat16',
    )
    label_smoothing: Later[float] = Field(
        default=0.0, ge=0, lt=1, description="share of a class label that is spread over all classes"
    )

    @model_validator(mode="after")
    def _rate_of_something(self) -> Self:
        if self.dropout_rate is not None and not self.dropout:
            raise ValueError("dropout_rate needs dropout = true")
        return self

    @model_validator(mode="after")
    def _fields_of_its_optimizer(self) -> Self:
        own: dict[str, tuple[str, ...]] = {
            "momentum": ("sgd",),
            "betas": ("adam", "adamw"),
            "eps": ("adam", "adamw"),
            **dict.fromkeys(("clip_norm", "schedule", "accumulate"), ("sgd", "adam", "adamw")),
        }
        for name, optimizers in own.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.optimizer not in optimizers:
                raise ValueError(f"{name} needs optimizer = {' or '.join(map(repr, optimizers))}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas must be at least 0 and below 1")
        return self

    def training(self) -> LocalTraining:
        """Return the table as the client takes it."""
        return LocalTraining(**{f.name: getattr(self, f.name) for f in fields(LocalTraining)})


class LoraTable(_Table):
    """[lora]: adapters are trained in place of the model."""

    rank: int = Field(default=8, ge=1, description="r")
    alpha: float | None = Field(default=None, gt=0, description="scale; 2 r when not set")
    modules: Modules = Field(
        default="attention",
        description='what has adapters: "attention", "all-linear", or roles, as "q,v"',
    )
    blocks: Later[tuple[int, ...] | None] = Field(
        default=None, min_length=1, description="blocks with adapters; all when not set"
    )
    dropout: Later[float] = Field(default=0.0, ge=0, lt=1, description="of what enters the adapters")
    warmup: int = Field(default=0, ge=0, description="steps of AdamW on other rows before the update")
    adapter: Later[str | None] = Field(
        default=None, description="folder of a saved adapter to begin with; it says rank, alpha and modules"
    )

    def given(self) -> Lora:
        """Return the table as the model takes it."""
        told = self.model_dump()
        return Lora(folder=told.pop("adapter"), **told)


class KnowledgeTable(_Table):
    """[knowledge]: which facts the attacker is given beside the model and the tensors."""

    batch_size: bool = Field(default=True, description="number of sentences")
    lengths: bool = Field(default=False, description="tokens of each sentence")
    longest: Later[bool] = Field(default=False, description="tokens of the longest sentence")
    labels: bool = Field(default=False, description="class labels")
    training: bool = Field(default=True, description="optimizer, learning rate, epochs, minibatch and its other fields")
    dropout: bool = Field(default=True, description="the dropout rate")
    defenses: bool = Field(default=True, description="which defenses act")

    def given(self) -> Given:
        """Return the table as the client takes it."""
        return Given(**self.model_dump())


class SelectionTable(_Table):
    """[selection]: which gradients the attacker sees."""

    tensors: str = Field(default="all", description='"all", "0-2:q,k,v", "*:f,p", "embeddings", "head"')

    @field_validator("tensors")
    @classmethod
    def _understood(cls, value: str) -> str:
        Selection(value)
        return value


class MetricsTable(_Table):
    """[metrics]: what is measured beside the standard scores."""

    published: tuple[str, ...] = Field(default=(), description="the papers' own scorings to show beside ours")
    diagnose: bool = Field(default=True, description="compare the matching loss at the truth and at the guess")
    lpips: Later[str | None] = Field(
        default=None, min_length=1, description="file of AlexNet's and LPIPS' weights (safetensors), for images"
    )

    @field_validator("published")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in PUBLISHED:
                raise unknown_name("published scoring", name, PUBLISHED)
        return value


class PublishedTable(_Table):
    """[published]: a paper's own numbers for this setting, for the tables in benchmarks/."""

    source: str = Field(description="paper, table, model, and how it scored")
    rouge1: float | None = Field(default=None, description="ROUGE-1 F1, 0 to 100")
    rouge2: float | None = Field(default=None, description="ROUGE-2 F1, 0 to 100")
    rougeL: float | None = Field(default=None, description="ROUGE-L F1, 0 to 100")  # noqa: N815 - the field's name
    seconds: float | None = Field(default=None, description="seconds a batch")
    note: str = Field(default="", description="why ours may differ")


class Case(_Table):
    """One setting of one attack on one model and data set. Machine matters (device, jobs) are not in it."""

    name: str = Field(default="", description="a short name for the report")
    model: str = Field(default="minilm", description="embedded name, hub id, folder, or random:SHAPE")
    layers: int | None = Field(default=None, ge=1, description="keep only the first blocks of the model")
    task: Task = Field(default="classification", description='"classification", "causal-lm" or "image-classification"')
    loss: Later[Loss] = Field(
        default="cross-entropy", description='"cross-entropy", or "squared": logits from one-hot labels'
    )
    seed: int = Field(default=0, ge=0, description="every random stream derives from it")
    data: DataSpec = Field(default_factory=DataSpec)
    public: Later[PublicSpec | None] = Field(
        default=None, description="[public] table: what the attacker has from elsewhere"
    )
    client: ClientTable = ClientTable()
    lora: Later[LoraTable | None] = Field(default=None, description="[lora] table: adapters through peft (extra: lora)")
    knowledge: KnowledgeTable = KnowledgeTable()
    selection: SelectionTable = SelectionTable()
    defense: tuple[dict[str, Any], ...] = Field(default=(), description="[[defense]] tables, in order")
    attack: dict[str, Any] = Field(default={"name": "auto"}, description="[attack]: name and fields")
    metrics: MetricsTable = MetricsTable()
    published: PublishedTable | None = Field(default=None, description="what a paper reports for it; not in the hash")

    @model_validator(mode="before")
    @classmethod
    def _digits_when_no_images_given(cls, given: Any) -> Any:
        # filled in before [data] fills in the sample, which is text
        if isinstance(given, dict) and given.get("task") == "image-classification":
            data = given.get("data", {})
            if isinstance(data, dict) and all(data.get(name) is None for name in ("source", "path", "hub")):
                return {**given, "data": {**data, "source": "digits"}}
        return given

    @model_validator(mode="after")
    def _buildable(self) -> Case:
        if self.task == "image-classification" and self.data.source == "sample":
            raise ValueError('the embedded sample is text: leave source away, or set source = "digits"')
        if self.metrics.lpips is not None and self.task != "image-classification":
            raise BadInputError("[metrics] lpips is a score of images; leave it away for text")
        if self.lora is not None and self.client.precision == "bf16-weights":
            raise BadInputError(
                'precision = "bf16-weights" is of whole models, and adapters are kept in float32: set "bf16", or leave '
                "[lora] away"
            )
        attack = self.build_attack()
        self.build_defenses()
        if self.data.window is not None and self.task != "causal-lm":
            raise BadInputError('[data] window cuts through rows and their labels: it needs task = "causal-lm"')
        if attack.unfitted and self.public is None and self.data.source != "digits":
            raise BadInputError(
                f"attack '{attack.name}' learns from public data: add a [public] table with the data that the attacker "
                "has, or name what 'gradaudit fit' made"
            )
        return self

    def build_attack(self) -> Any:
        """Return the attack of [attack], of whichever kind of model."""
        return _build("attack", self.attack)

    def build_defenses(self) -> tuple[Defense, ...]:
        """Return the defenses of [[defense]], in order."""
        return tuple(_build("defense", table) for table in self.defense)

    def resolved(self) -> dict[str, Any]:
        """Return the case with every default written out, as plain data."""
        data = self.model_dump(mode="json")
        data["attack"] = json.loads(json.dumps(describe(self.build_attack())))
        data["defense"] = [json.loads(json.dumps(describe(d))) for d in self.build_defenses()]
        return data

    def content_hash(self) -> str:
        """Return 16 hex digits that change with anything that can change the result."""
        data = self.resolved()
        one = self.client.optimizer == "none"
        data["attack"] = json.loads(json.dumps(identity(self.build_attack(), one)))
        data["defense"] = [json.loads(json.dumps(identity(d, one))) for d in self.build_defenses()]
        _leave_out_later(self, data)
        del data["published"]  # another paper's numbers change nothing in ours
        if self.public is not None and self.public.source != "words":
            del data["public"]["language"]
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def setting(self) -> str:
        """Return a short name of the client's setting, for tables."""
        if self.name:
            return self.name
        rate = f" {self.client.dropout_rate:g}" if self.client.dropout_rate else ""
        parts = [f"dropout on{rate}" if self.client.dropout else "dropout off"]
        if self.loss != "cross-entropy":
            parts.append(f"{self.loss} loss")
        if self.client.freeze:
            parts.append("frozen: " + ", ".join(self.client.freeze))
        if self.client.clients > 1:
            parts.append(f"{self.client.clients} clients summed")
        if self.client.padding != "right":
            parts.append(f"padded on the {self.client.padding}")
        if self.lora is not None:
            parts.append(self.lora.given().title)
        if self.client.precision != "fp32":
            parts.append(self.client.precision)
        if self.client.optimizer != "none":
            parts.append(f"{self.client.optimizer} {self.client.epochs} epochs")
        parts += [str(d.get("name")) for d in self.defense]
        return "; ".join(parts)


def _leave_out_later(table: BaseModel, data: dict[str, Any]) -> None:
    """Take out of a table's data what was added later and is not set, so that cases of before keep their ids."""
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if LATER in field.metadata and value == field.default:
            del data[name]
        elif isinstance(value, BaseModel):
            _leave_out_later(value, data[name])


def _build(kind: str, table: dict[str, Any]) -> Any:
    values = dict(table)
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise BadInputError(f"[{kind}] needs a name; see 'gradaudit list {kind}s'")
    return build(kind, name, values)


def parse_case(data: dict[str, Any]) -> Case:
    """Return the case of parsed TOML.

    Raises:
        BadInputError: one sentence for the first thing wrong, with the closest known key for an unknown one.
    """
    try:
        return Case.model_validate(data)
    except ValidationError as error:
        raise _explained(error) from None


def load_case(path: Path, settings: Sequence[str] = ()) -> Case:
    """Return the case of a TOML file, with `--set` overrides applied.

    Args:
        path: the file.
        settings: "attack.steps=100" assignments; values are TOML, or plain text where that is no TOML.

    Raises:
        BadInputError: no such file, empty, not TOML, unknown key, value that does not fit.
    """
    data = case_data(path, settings)
    if "axes" in data:
        raise BadInputError(f"{path} has [axes]: it is a sweep; use 'gradaudit sweep {path} --out DIR'")
    return parse_case(data)


def case_data(path: Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a TOML file holds, with `--set` overrides applied; see `load_case`."""
    if not path.is_file():
        raise BadInputError(f"no such case file: {path}; 'gradaudit init' writes one")
    data = read_toml(path)
    if not data:
        raise BadInputError(f"{path} is empty; 'gradaudit show case example' prints one to start from")
    for setting in settings:
        assign(data, setting)
    return data


def assign(data: dict[str, Any], setting: str) -> None:
    """Put a "attack.steps=100" assignment into a case's tables."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise BadInputError(f"--set takes key=value, for example attack.steps=100; got '{setting}'")
    *path, last = key.strip().split(".")
    table = data
    for part in path:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise BadInputError(f"--set {key}: '{part}' is a value, not a table")
        table = inner
    table[last] = parse_value(text)


def parse_value(text: str) -> Any:
    """Return a command-line value: TOML where it is some, else the text itself.

    Raises:
        BadInputError: bytes that are no text, brackets or digits without end.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInputError(f"--set takes text in UTF-8, got {text!r:.80}") from None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError):
        raise BadInputError(f"--set takes no such value: {text:.40}... has too many digits or brackets") from None
    refuse_depth(value, f"--set {text:.40}...")
    return value


def _explained(error: ValidationError) -> BadInputError:
    first = error.errors()[0]
    cause = (first.get("ctx") or {}).get("error")
    if isinstance(cause, BadInputError):
        return cause
    where = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        table: Any = Case
        for part in where[:-1]:
            table = _table_of(table, part)
        place = f"key in [{'.'.join(where[:-1])}]" if len(where) > 1 else "key"
        return unknown_name(place, where[-1], table.model_fields)
    if first["type"] == "missing":
        return BadInputError(f"the case lacks '{'.'.join(where)}'")
    message = str(first["msg"]).removeprefix("Value error, ")
    return BadInputError(f"{'.'.join(where) or 'case'}: {message}, got {first.get('input')!r}" if where else message)


def _table_of(table: type[BaseModel], key: str) -> type[BaseModel]:
    annotation = table.model_fields[key].annotation
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return table
