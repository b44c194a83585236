"""What QLoRA gives away: adapters on a base of four or eight bits, trained by a stock loop of peft and bitsandbytes.

    OMP_NUM_THREADS=1 python benchmarks/qlora.py --write benchmarks/results/adapters/qlora.md

SmolLM2 is loaded by transformers with bitsandbytes' quantization, made ready by peft's
`prepare_model_for_kbit_training`, and gets adapters of rank 8 on q, k, v and o. Each batch: fresh adapters, ten steps
of AdamW on other text, then one step on the batch inside `gradaudit.capture`, whose bundle is attacked as anybody's.
The attacker has the base and the adapters before the step and the batch size, of a weight change how it was made; not
labels or lengths. Beside it blind guessing: as many of the commonest words as the batch holds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from grid import DATA, commit, made, markdown, options, write_table
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

import gradaudit
from gradaudit.bundles.examine import Examination, examine
from gradaudit.data.draw import draw
from gradaudit.data.spec import DataSpec
from gradaudit.data.text import load_rows
from gradaudit.machine import ready_process
from gradaudit.models.packages import smollm2_folder
from gradaudit.progress import step
from gradaudit.types import LocalTraining

DRAW = 14143
"""Seed of the draw, which nobody saw before the method stood."""
RATE, WARMUP = 2e-4, 10
FOUR, EIGHT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}
DIRECTIONS = "0:q,k,v"
"""What words are read from; sentences need all adapters, and a base that computes in float32."""


@dataclass(frozen=True)
class Row:
    """A row of the table: how the base is packed, how the step is made, batches of one size, what the attacker sees."""

    title: str
    how: dict[str, Any]
    size: int
    batches: int
    tensors: str = DIRECTIONS
    delta: bool = False
    autocast: bool = False


NF4 = FOUR | {"bnb_4bit_compute_dtype": torch.float32}
NF4_BF16 = FOUR | {"bnb_4bit_compute_dtype": torch.bfloat16}
ROWS = (
    *(Row("NF4, computes in float32; one gradient", NF4, b, n, "all") for b, n in ((1, 5), (2, 5), (4, 3))),
    *(Row("NF4, computes in bfloat16; one gradient", NF4_BF16, b, n) for b, n in ((1, 5), (4, 5), (8, 3))),
    Row("NF4, under bfloat16 autocast; one AdamW step at 2e-4", NF4_BF16, 4, 5, delta=True, autocast=True),
    Row("int8; one gradient", EIGHT, 4, 3),
)
COLUMNS = (
    "base and update", "sees", "B", "batches", "tokens", "words named %", "of them right %", "blind named %",
    "certain %", "of the certain right %", "exact sentences %", "proven", "proven, wrong", "median s",
)  # fmt: skip


def loaded(how: dict[str, Any]) -> tuple[Any, Any]:
    """Return SmolLM2 as a packed classifier, ready for adapters, and its tokenizer."""
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, pad_token_id=tokenizer.pad_token_id, quantization_config=BitsAndBytesConfig(**how)
    )
    # in training mode, as a Trainer sets it: bitsandbytes repacks a base in eval mode for fast inference on a CPU
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False).train(), tokenizer


def captured(row: Row, base: Any, tokenizer: Any, texts: list[str], others: list[str], out: Path) -> None:
    """Train fresh adapters on other text, then capture one step on the batch."""
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = peft.get_peft_model(base, lora)
    weights = [p for p in model.parameters() if p.requires_grad]

    def advance(some: list[str], optimizer: torch.optim.Optimizer) -> None:
        batch = tokenizer(some, padding=True, return_tensors="pt")
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if row.autocast else nullcontext():
            loss = model(**batch, labels=torch.arange(len(some)) % 2).loss
        loss.backward()
        optimizer.step()

    warm = torch.optim.AdamW(weights, RATE)
    for at in range(WARMUP):
        advance(others[4 * at : 4 * at + 4], warm)
    fresh = torch.optim.AdamW(weights, RATE)
    precision = {"precision": "bf16"} if row.autocast else {}
    told = LocalTraining("adamw", RATE, weight_decay=0.01, **precision) if row.delta else None
    what = "delta" if row.delta else "gradient"
    with gradaudit.capture(model, out, tokenizer=tokenizer, what=what, training=told, sentences=row.size):
        advance(texts, fresh)
    model.unload()


def counts(found: Examination, true: list[tuple[int, ...]], common: list[int]) -> dict[str, float]:
    """Return what of a batch was read: shares in percent of words and sentences, and proofs by number."""
    words = {token for row in true for token in row}
    named = found.words or ()
    certain = [word for word in named if word.certain]
    exact = sum(row in found.ids for row in true)
    proven = [i for i, told in zip(found.ids, found.certificates or (), strict=False) if told == "proven"]
    told = {
        "named": 100 * len({w.id for w in named} & words) / len(words),
        "blind": 100 * len(set(common[: len(words)]) & words) / len(words),
        "certain": 100 * len({w.id for w in certain} & words) / len(words),
        "exact": 100 * exact / len(true),
        "proven": len(proven),
        "wrong": sum(row not in true for row in proven),
        "seconds": found.seconds,
        "tokens": sum(len(row) for row in true),
    }
    if named:
        told["right"] = 100 * sum(w.id in words for w in named) / len(named)
    if certain:
        told["certain right"] = 100 * sum(w.id in words for w in certain) / len(certain)
    return told


def batches_of(row: Row, tokenizer: Any) -> Iterator[tuple[list[str], list[str], list[int]]]:
    """Yield each batch's texts, the text of the rounds before, and tokens by how common they are there."""
    spec = DataSpec.model_validate(
        DATA["cola"] | {"shuffle_seed": DRAW, "batch_size": row.size, "batches": row.batches}
    )
    rows = load_rows(spec, Path.cwd())
    drawn = draw(spec, rows)
    mine = {at for batch in drawn for at in batch}
    rest = [text for at, text in enumerate(rows.texts) if at not in mine and text.strip()][: 4 * WARMUP * row.batches]
    seen: dict[int, int] = {}
    for ids in tokenizer(rest)["input_ids"]:
        for token in ids:
            seen[token] = seen.get(token, 0) + 1
    common = sorted(seen, key=lambda token: -seen[token])
    for at, batch in enumerate(drawn):
        yield [rows.texts[i] for i in batch], rest[4 * WARMUP * at : 4 * WARMUP * (at + 1)], common


def measured(row: Row, base: Any, tokenizer: Any) -> list[str]:
    """Return a row of the table."""
    found = []
    for texts, others, common in batches_of(row, tokenizer):
        with tempfile.TemporaryDirectory() as place:
            captured(row, base, tokenizer, texts, others, Path(place) / "up")
            read = examine(Path(place) / "up", "decode", [], row.tensors, None, 0, torch.device("cpu"))
        found.append(counts(read, [tuple(ids) for ids in tokenizer(texts)["input_ids"]], common))
        step(row.title, len(found), row.batches)

    def mean(name: str) -> str:
        some = [one[name] for one in found if name in one]
        return f"{statistics.mean(some):.1f}" if some else "-"

    tokens = [int(one["tokens"]) for one in found]
    proven, wrong = (int(sum(one[name] for one in found)) for name in ("proven", "wrong"))
    return [
        row.title, row.tensors, str(row.size), str(row.batches), f"{min(tokens)}-{max(tokens)}", mean("named"),
        mean("right"), mean("blind"), mean("certain"), mean("certain right"), mean("exact"),
        f"{proven}/{row.size * row.batches}", str(wrong),
        f"{statistics.median(one['seconds'] for one in found):.1f}",
    ]  # fmt: skip


def main() -> None:
    """Measure every row, and print or write the table."""
    parser = options(__doc__)
    parser.add_argument("--write", type=Path, default=None, help="Markdown file for the table")
    parser.add_argument("--rows", default="", help="their numbers, as 0,3; all when not given")
    given = parser.parse_args()
    ready_process()
    commit()
    wanted = [ROWS[int(n)] for n in given.rows.split(",")] if given.rows else list(ROWS)
    lines: list[list[str]] = []
    for row in wanted:
        lines.append(measured(row, *loaded(row.how)))
        print(json.dumps(lines[-1]), flush=True)
    head = f"{made()} CoLA, draw {DRAW}, not used in development."
    if given.write is not None:
        write_table(given.write, head, markdown(COLUMNS, lines))
    else:
        print(markdown(COLUMNS, lines))


if __name__ == "__main__":
    sys.exit(main())
