"""Made-up records, texts and summaries of the report tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from gradaudit.files import append_line
from gradaudit.flags import FLAGS
from gradaudit.record import Diagnosis, Interval, Mark, Record, RunInfo, SentenceMarks, Spectrum, Summary, Texts
from gradaudit.report.render import render_html
from gradaudit.scores import SCORES

TEXT_SCORES = SCORES["text"].names


HOSTILE = (
    "<script>alert(1)</script>",
    '"onmouseover="alert(2)',
    "abc\u202edef",
    "zero\u200bwidth",
    "nul\x00l",
    "<!--",
    "</style>",
    "{{7*7}}",
    "new\u2028line",
)
ORIGINAL = ("Zbigniew", "Kowalczyk", "received", "morphine", "on", "Wednesday", "by", "orthopedics")
RECOVERED = ("Zbigniew", "received", "Kowalczyk", "penicillin", "on", "Wednesday")
ORIGINAL_MARKS: tuple[Mark, ...] = (
    "right",
    "misplaced",
    "misplaced",
    "missing",
    "right",
    "right",
    "missing",
    "missing",
)
RECOVERED_MARKS: tuple[Mark, ...] = ("right", "misplaced", "misplaced", "wrong", "right", "right")


def make_info(**changed: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "program": "0.1.0",
        "case": "3f9c0a7be1d24480",
        "case_data": {"selection": "0-5:q,k,v", "seed": 101, "attacks": ["decode", "tag", "blind"]},
        "model": {
            "title": "minilm",
            "fingerprint": "a1b2c3d4e5f60718293a",
            "width": 384,
            "depth": 6,
            "parameters": 22_700_000,
            "random_weights": False,
        },
        "data": {"where": "embedded sample", "sha256": "9f86d081884c7d65", "rows": 200},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.1.0", "numpy": "2.4.6"},
        "device": "cpu",
        "settings": {
            "dropout off": "one gradient of a batch of 4 sentences, dropout off, no defense",
            "pruned 90 %": "the same, with the smallest 90 % of the update set to zero",
            "noise 0.01": "the same, with Gaussian noise of standard deviation 0.01 on the update",
        },
        "made": "2025-11-21T04:30:00+00:00",
    }
    return RunInfo(**{**fields, **changed})


def make_marks(exact: bool = False, **changed: Any) -> SentenceMarks:
    whole: tuple[Mark, ...] = ("right",) * len(ORIGINAL)
    fields: dict[str, Any] = {
        "recovered": whole if exact else RECOVERED_MARKS,
        "original": whole if exact else ORIGINAL_MARKS,
        "certificate": "proven" if exact else "guess",
        "rougeL": 100.0 if exact else 57.1,
        "exact": exact,
    }
    return SentenceMarks(**{**fields, **changed})


def make_record(**changed: Any) -> Record:
    fields: dict[str, Any] = {
        "case": "3f9c0a7be1d24480",
        "setting": "dropout off",
        "batch": 0,
        "attack": "decode",
        "scores": dict.fromkeys(TEXT_SCORES, 12.0),
        "baseline": dict.fromkeys(TEXT_SCORES, 8.0),
        "load": 0.11,
        "tokens": 42,
        "batch_size": 2,
        "seconds": 1.5,
    }
    return Record(**{**fields, **changed})


def make_texts(record: Record, words: Sequence[str] = RECOVERED, exact: bool = False) -> Texts:
    theirs = ORIGINAL if exact else tuple(words)
    count = len(record.sentences)
    return Texts(
        case=record.case,
        setting=record.setting,
        batch=record.batch,
        attack=record.attack,
        originals=(" ".join(ORIGINAL),) * count,
        recovered=(" ".join(theirs),) * count,
        original_words=(ORIGINAL,) * count,
        recovered_words=(theirs,) * count,
    )


def make_summaries(records: Sequence[Record]) -> list[Summary]:
    """Summarize in the plainest way, so that these tests do not lean on the metrics."""

    def interval(values: list[float | None]) -> Interval:
        known = [v for v in values if v is not None]
        if not known:
            return Interval(mean=None, n=0)
        mean = sum(known) / len(known)
        if len(known) < 2:
            return Interval(mean=mean, worst=max(known), n=1)
        return Interval(mean=mean, low=min(known), high=max(known), worst=max(known), n=len(known))

    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.setting, record.attack), []).append(record)
    return [
        Summary(
            case=own[0].case,
            setting=setting,
            attack=attack,
            n=len(own),
            failed=sum(r.error is not None for r in own),
            scores={name: interval([r.scores.get(name) for r in own]) for name in TEXT_SCORES},
            baseline={name: interval([r.baseline.get(name) for r in own]) for name in TEXT_SCORES},
            sensitive=interval([r.sensitive for r in own]) if any(r.sensitive is not None for r in own) else None,
            seconds=sum(r.seconds for r in own) / len(own),
            flags=tuple(dict.fromkeys(flag for r in own for flag in r.flags)),
        )
        for (setting, attack), own in groups.items()
    ]


def make_run(batches: int = 3) -> tuple[list[Record], list[Texts]]:
    """Three settings, three attacks, everything a report can show, one hostile text and one failed batch."""
    records: list[Record] = []
    texts: list[Texts] = []
    given = {"batch_size": 2, "dropout": 0.0, "training": {"optimizer": "none", "epochs": 1}, "defenses": []}
    for setting, share in (("dropout off", 1.0), ("pruned 90 %", 0.4), ("noise 0.01", 0.08)):
        noisy = share < 0.1
        for attack, strength in (("decode", 88.0), ("tag", 31.0), ("blind", 8.0)):
            for batch in range(batches):
                read = attack == "decode" and share == 1.0
                error = "out of memory at step 3" if attack == "tag" and batch == 2 else None
                score = 0.0 if error else (8.0 if attack == "blind" else strength * share) + 2.0 * batch
                record = make_record(
                    setting=setting,
                    attack=attack,
                    batch=batch,
                    scores={**dict.fromkeys(TEXT_SCORES, score), "exact": 50.0 if read else 0.0},
                    baseline={**dict.fromkeys(TEXT_SCORES, 7.9), "exact": 0.0},
                    published={"LAMP": {"rouge1": score + 4, "rouge2": score, "rougeL": score + 3}},
                    flags=(next(iter(FLAGS)),) if attack == "tag" else (),
                    error=error,
                    knowledge={} if attack == "blind" else {**given, **({"lengths": [10, 12]} if read else {})},
                    sensitive=score * 0.9 if share > 0.1 else 2.0,
                    sensitive_baseline=2.0,
                    certificates={"proven": 1, "guess": 1} if read else {},
                    spectrum=Spectrum(
                        layer=0,
                        roles="qkv",
                        values=tuple(
                            10 ** (-2.5 * i / 42) if i < 42 else (2e-3 if noisy else 3e-8) * 0.995**i
                            for i in range(384)
                        ),
                        rank=42,
                        tokens=42,
                        width=384,
                        confidence=1.9 if noisy else 1.1e5,
                    ),
                    share_of_parameters=0.117,
                    diagnosis=None
                    if attack == "blind"
                    else Diagnosis(truth=0.0, guess=0.4, verdict="solved" if read else "optimizer failed"),
                    sentences=() if error else (make_marks(exact=read), make_marks()),
                    notes=("not identifiable: two words embed alike",) if noisy and attack == "decode" else (),
                )
                records.append(record)
                if not error:
                    words = (*RECOVERED[:4], *HOSTILE) if attack == "tag" and batch == 0 else RECOVERED
                    item = make_texts(record, words)
                    if read:
                        exact = (ORIGINAL, *item.recovered_words[1:])
                        item = item.model_copy(update={"recovered_words": exact})
                    texts.append(item)
    return records, texts


def make_folder(folder: Path, batches: int = 3) -> Path:
    records, texts = make_run(batches)
    (folder / "run.json").write_text(make_info().model_dump_json())
    for record in records:
        append_line(folder / "records.jsonl", record)
    for item in texts:
        append_line(folder / "texts.jsonl", item, private=True)
    return folder


def page(show_text: bool = False, **changed: Any) -> str:
    records, texts = make_run()
    fields: dict[str, Any] = {"info": make_info(), "records": records, "texts": texts, **changed}
    return render_html(summaries=make_summaries(fields["records"]), show_text=show_text, **fields)


class Markup(HTMLParser):
    """Checks that tags balance and ids are unique, and collects the text a reader sees."""

    VOID = frozenset({"meta", "link", "br", "img", "hr", "input", "path", "circle", "polyline"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.labelled: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.labelled += [value or "" for name, value in attrs if name == "aria-labelledby"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))
