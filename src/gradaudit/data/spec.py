"""Which data a case names, and how its batches are drawn."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gradaudit.data.named import NAMED, SetName

# strict, so that True is not taken for column 1
ColumnNumber = Annotated[int, Field(strict=True, ge=0)]


LATER = "later"
T = TypeVar("T")
Later = Annotated[T, LATER]
"""A field that was added after cases were run: at its default it is no part of a case's id."""


class SourceSpec(BaseModel):
    """Where rows come from, and which of their columns are used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["sample", "digits", "words", SetName] | None = Field(
        default=None,
        description='"sample" for the embedded sentences, "digits" for images: taken without path and hub; "cola", '
        '"sst2", "rotten-tomatoes", "wikitext-2", "cifar10": data sets by name; "words", in '
        "[public] only, for words drawn by their frequency (gradaudit[words])",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="local file (csv, tsv, jsonl, parquet, txt, tokens; images: parquet or a folder of classes), from "
        "the case file's or current folder",
    )
    hub: str | None = Field(
        default=None, min_length=1, description="id of a data set on the Hugging Face hub (gradaudit[data])"
    )
    config: str | None = Field(default=None, description="configuration of the hub data set")
    split: str = Field(default="train", min_length=1, description="split of the hub data set, or of the named one")
    header: bool = Field(default=True, description="whether the first line of a csv or tsv names the columns")
    text: str | ColumnNumber = Field(
        default="text", description="column of the text: a name, or a number counted from 0"
    )
    image: Later[str | ColumnNumber] = Field(
        default="image", description="column of the encoded images: a name, or a number"
    )
    label: str | ColumnNumber | None = Field(
        default=None,
        description="column of the class label: a name, or a number counted from 0; the sample and images have theirs",
    )
    shuffle_seed: int | None = Field(
        default=None,
        ge=0,
        le=2**32 - 1,
        description="numpy seed that shuffles the rows first (the papers use 101); file order without it",
    )

    @model_validator(mode="before")
    @classmethod
    def _sample_when_none_given(cls, given: Any) -> Any:
        # filled in here, not read as a default, so that both ways of writing it give one content hash
        if isinstance(given, Mapping) and all(given.get(name) is None for name in ("source", "path", "hub")):
            return {**given, "source": "sample"}
        return given

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("source", "path", "hub") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; keep one of source, path and hub")
        if self.set_name is not None:
            self._fits_named(self.set_name)
            return self
        for name, asked in (("config", self.config is not None), ("split", self.split != "train")):
            if asked and self.hub is None:
                raise ValueError(f"{name} is for hub data sets only; remove it or name the data set with hub")
        return self

    @property
    def set_name(self) -> SetName | None:
        """The named data set that this is; None for any other source."""
        return next((name for name in NAMED if name == self.source), None)

    def _fits_named(self, name: SetName) -> None:
        """Refuse columns beside the name of a set, which has its own, and a split that it does not have."""
        for key in ("config", "header", "text", "image", "label"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"data set '{name}' has its own columns; remove {key}")
        splits = NAMED[name].files
        if self.split not in splits:
            raise ValueError(f"data set '{name}' has no split '{self.split}'; set split to {' or '.join(splits)}")


class DataSpec(SourceSpec):
    """Which rows an audit attacks: a source, its columns, and how the batches are drawn from it."""

    batch_size: int = Field(default=1, ge=1, description="texts or images a batch")
    batches: int = Field(default=1, ge=1, description="number of batches")
    skip: int = Field(default=0, ge=0, description="rows of the drawn order to pass over first")
    window: Later[int | None] = Field(
        default=None,
        ge=2,
        description="cut the rows, joined, into windows of so many tokens, without special tokens; task causal-lm",
    )

    @model_validator(mode="after")
    def _real(self) -> Self:
        if self.source == "words":
            raise ValueError('source = "words" is drawn by chance, nobody\'s data: it is for [public]')
        return self


class PublicSpec(SourceSpec):
    """[public]: what the attacker has, for attacks that learn; none of it is in an audited batch."""

    rows: int | None = Field(
        default=None,
        ge=1,
        description="at most so many rows, windows or images; all when not set (20,000 words' texts)",
    )
    language: str = Field(default="en", min_length=1, description='of source = "words": a code, as "en" or "de"')

    @model_validator(mode="after")
    def _language_of_words(self) -> Self:
        if self.language != "en" and self.source != "words":
            raise ValueError('language is for source = "words" only; remove it')
        return self
