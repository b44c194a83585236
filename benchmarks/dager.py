"""DAGER, all that its paper reports and what lies past it; a table a group in benchmarks/results/dager/.

    OMP_NUM_THREADS=1 python benchmarks/dager.py exact past curve encoders lora precision fedavg variants \\
        released trained

Groups: exact (decoders below the width), past (and beyond it), curve (half to four times a small width), encoders (the
paper's search), lora (adapters of SmolLM2, trained a few steps), precision (half precision, integers, Gaussian noise),
fedavg (the paper's grid and beyond; four blocks, random weights), variants (other losses, ReLU, padding on the left,
texts of 500 tokens), released (the released code's rules beside ours, on the same batches), trained (the same past
one gradient: local steps, noise, load, adapters). Records go to out/benchmarks (a run that was stopped goes on there)
and hold no text. Failures count 0.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from grid import DATA, OFF, Cell, Done, Options, Program, each, main
from tokenizers import Tokenizer, processors

from gradaudit.data.spec import SourceSpec
from gradaudit.data.text import load_rows
from gradaudit.metrics.summary import summarize
from gradaudit.models import packages
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model

PLAIN = {"name": "dager", "embedding_rows": False}
"""What the paper reads: the attention's gradients, and not the word embedding's, whose rows name the words."""


def setting(
    title: str,
    model: str,
    data: str,
    size: int,
    batches: int,
    client: Mapping[str, Any] = OFF,
    *,
    attack: Mapping[str, Any] = PLAIN,
    seed: int = 202,
    published: str = "",
    defense: tuple[dict[str, Any], ...] = (),
    **more: Any,
) -> Cell:
    """Return a cell; what is not named in a `Cell` goes into the case, where it is set."""
    kept: dict[str, Any] = {key: value for key, value in more.items() if value is not None}
    if data in MADE:
        kept["data"] = MADE[data] | {"shuffle_seed": seed, "batch_size": size, "batches": batches}
    return Cell(data, size, batches, client, model, seed=seed, defense=defense, published=published, title=title,
                attack=attack, more=kept)  # fmt: skip


LONG, RELU = Path("out/data/rotten_tomatoes_long.tsv"), Path("out/data/gpt2-relu")
NARROW, WIDTH = Path("out/data/gpt2-narrow"), 192
FRAMED = Path("out/data/smollm2-framed")
MADE: dict[str, dict[str, Any]] = {"rt, 500 tokens": {"path": str(LONG), "header": False, "text": 1, "label": 0}}


def make() -> None:
    """Write what variants needs: Rotten Tomatoes in texts of about 500 tokens, and GPT-2's shape with ReLU."""
    found = load_rows(SourceSpec(**DATA["rt"]), Path.cwd())
    rows = list(zip(map(str, found.labels or ()), found.texts, strict=True))
    random.Random(0).shuffle(rows)
    texts: list[tuple[str, str]] = []
    for label, sentence in rows:
        # 380 words are about 500 tokens of GPT-2 and SmolLM2, which is below both widths
        if not texts or len(texts[-1][1].split()) + len(sentence.split()) > 380:
            texts.append((label, ""))
        texts[-1] = (texts[-1][0], f"{texts[-1][1]} {sentence}".strip())
    LONG.parent.mkdir(parents=True, exist_ok=True)
    LONG.write_text("".join(f"{label}\t{text}\n" for label, text in texts), encoding="utf8")
    model = load_model(ModelSpec("random:gpt2", layers=1))
    model.module.config.activation_function = "relu"
    model.module.config.save_pretrained(RELU)
    model.tokenizer.save_pretrained(RELU)


def make_narrow() -> None:
    """Write what curve needs: GPT-2's shape at a quarter of its width, where four times the width are 76 sentences."""
    model = load_model(ModelSpec("random:gpt2", layers=1))
    config = model.module.config
    config.n_embd, config.n_head = WIDTH, WIDTH // 64
    config.save_pretrained(NARROW)
    model.tokenizer.save_pretrained(NARROW)


def make_framed() -> None:
    """Write what released needs: SmolLM2 whose sentences begin with its first token, as Llama's do."""
    source = packages.smollm2_folder()
    FRAMED.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if not (FRAMED / path.name).exists():
            (FRAMED / path.name).symlink_to(path)
    inner, first = Tokenizer.from_file(str(source / "tokenizer.json")), "<|im_start|>"
    inner.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, inner.token_to_id(first))]
    )
    (FRAMED / "tokenizer.json").unlink()
    inner.save(str(FRAMED / "tokenizer.json"))


RELEASED = PLAIN | {"roles": ["q"], "rank": "paper", "threshold": "paper", "remove_used": "always"}
"""The released code's rules."""
SHORT = PLAIN | {"max_candidates": 2_000_000}
"""The paper's encoder search at a fifth of its products a length: two to three minutes of one core."""


def exact() -> list[Cell]:
    """Decoders below the width: no batch may be lost."""
    published = {("random:gpt2", "cola"): "100", ("random:gpt2", "sst2"): "100 to B = 32, 92.9 at 64"}
    sizes = {"cola": (1, 4, 8, 16, 32), "sst2": (1, 4, 16, 32), "rt": (1, 4, 16)}
    cells = [
        setting("", model, data, size, 20, layers=layers, published=published.get((model, data), ""))
        for model, layers in (("smollm2", None), ("random:gpt2", 4)) for data, many in sizes.items() for size in many
    ]  # fmt: skip
    return [*cells, setting("", "random:gpt2", "cola", 64, 20, layers=4, published="100")]


def past() -> list[Cell]:
    """Around and past the width, on a draw of its own: what reads it was developed on the first batches of 202."""
    gpt2 = [("cola", 64, "100 (B = 64)"), ("cola", 96, ""), ("cola", 128, "30.3 (B = 128, 1.3 d)")]
    gpt2 += [("rt", 32, "98.0 (B = 32)"), ("sst2", 128, "13.7 (B = 128, about 2 d)"), ("rt", 48, "2.8 (B = 64)")]
    cells = [
        setting("", "random:gpt2", data, size, 2, layers=4, published=value, seed=404) for data, size, value in gpt2[:3]
    ]
    cells += [setting("", "smollm2", "cola", size, 2, layers=8, seed=404) for size in (64, 96)]
    cells += [
        setting("", "random:gpt2", data, size, 2, layers=4, published=value, seed=404) for data, size, value in gpt2[3:]
    ]
    rows = {"name": "dager"}
    sizes = (("random:gpt2", 4, "cola", 96), ("random:gpt2", 4, "cola", 128), ("smollm2", 8, "cola", 96))
    sizes += (("random:gpt2", 4, "rt", 48), ("random:gpt2", 4, "sst2", 128), ("random:gpt2", 4, "rt", 96))
    cells += [
        setting("embedding rows", model, data, size, 2, layers=layers, attack=rows, seed=404)
        for model, layers, data, size in sizes
    ]
    # 2, 3 and 4 d of short sentences
    far = [setting("", "random:gpt2", "cola", size, 2, layers=4, seed=404) for size in (152, 228, 304)]
    return cells + far + [replace(cell, title="embedding rows", attack=rows) for cell in far[1:]]


def curve() -> list[Cell]:
    """From half the width to four times the width, without and with the word embedding's rows."""
    model, sizes = f"random:{NARROW}", (10, 19, 28, 38, 47, 57, 76)
    cells = [setting("", model, "cola", size, 2, layers=4, seed=404) for size in sizes]
    return cells + [replace(cell, title="embedding rows", attack={"name": "dager"}) for cell in cells[3:]]


LONG_ROWS = (("sst2", 2), ("sst2", 4), ("rt", 2), ("rt", 4))
"""Rows with so many long sentences that the paper's 10 million products a length would take hours a batch."""


def encoders() -> list[Cell]:
    """The paper's encoder rows, by its search; `decode` stands beside them in exact-decoding/benchmark.md."""
    values = {"cola": ("100", "100", "94.0"), "sst2": ("100", "99.3", "95.6"), "rt": ("100", "98.1", "66.8")}
    return [
        setting("", "minilm", data, size, 5, attack=SHORT if (data, size) in LONG_ROWS else PLAIN, published=value)
        for data, row in values.items() for size, value in zip((1, 2, 4), row, strict=True)
    ]  # fmt: skip


def lora() -> list[Cell]:
    """Adapters of rank 8 to 256 after ten steps, and at the first, where B is zero; tokens over rank tell the load."""
    cells = [setting("first step", "smollm2", "cola", 1, 2, lora={"rank": 8})]
    sizes = {8: (1, 2, 4), 16: (1, 2, 4, 8), 64: (4, 8, 16, 32), 256: (16, 32)}
    cells += [
        setting("ten steps", "smollm2", "cola", size, 5, lora={"rank": rank, "warmup": 10})
        for rank, some in sizes.items() for size in some
    ]  # fmt: skip
    cells.append(setting("ten steps", "smollm2", "rt", 16, 5, published="94.8", lora={"rank": 256, "warmup": 10}))
    wide = {"warmup": 10, "modules": "all-linear"}
    return cells + [setting("ten steps", "smollm2", "cola", 16, 5, lora={"rank": r} | wide) for r in (64, 256)]


def precision() -> list[Cell]:
    """Half precision and 8-bit integers at B = 1, 4, 16, and the paper's noise at B = 1."""
    cells = []
    for model in ("smollm2", "random:gpt2"):
        for size in (1, 4, 16):
            for name, how in (("float32", ()), ("bfloat16", (16,)), ("int8", (8,))):
                defense = tuple({"name": "quantize", "bits": bits} for bits in how)
                cells.append(setting(name, model, "cola", size, 3, defense=defense))
        for sigma, value in NOISES:
            noise = ({"name": "gaussian", "sigma": sigma},)
            cells.append(setting(f"noise {sigma:g}", model, "rt", 1, 5, defense=noise, published=value))
    return cells


def fedavg_grid() -> list[tuple[str, dict[str, Any], str]]:
    """The paper's grid around 10 epochs, learning rate 1e-4, minibatches of 4: names, changes, published ROUGE-1."""
    grid: list[tuple[str, dict[str, Any], str]] = [("epochs 10, lr 1e-4, minibatch 4", {}, "95.4")]
    grid += [(f"epochs {e}", {"epochs": e}, v) for e, v in ((2, "98.4"), (5, "97.3"), (20, "96.0"))]
    grid += [(f"lr {r:g}", {"learning_rate": r}, v) for r, v in ((1e-5, "100"), (5e-5, "99.8"), (5e-4, "84.2"))]
    return grid + [(f"minibatch {m}", {"minibatch": m}, v) for m, v in ((2, "93.2"), (8, "98.6"), (16, "100"))]


FEDAVG = {"dropout": False, "optimizer": "sgd", "learning_rate": 1e-4, "epochs": 10, "minibatch": 4}
LARGER = (1e-3, 1e-2)
"""Learning rates past the paper's grid."""
NOISES = ((1e-5, "74.0"), (5e-5, "46.9"), (1e-4, "20.7"), (5e-4, "5.6"))
"""Standard deviations of the paper's noise, and its ROUGE-1."""


def fedavg() -> list[Cell]:
    """The paper's grid; larger rates and AdamW."""
    grid = fedavg_grid() + [(f"lr {r:g}", {"learning_rate": r}, "") for r in LARGER]
    grid += [("AdamW, lr 1e-4", {"optimizer": "adamw"}, "")]
    return [
        setting(title, "random:gpt2", "rt", 16, 2, FEDAVG | how, layers=4, published=value)
        for title, how, value in grid
    ]


def variants() -> list[Cell]:
    """What else the paper reports: losses, activation, padding, length."""
    cells = []
    for model, layers in (("random:gpt2", 4), ("smollm2", None)):
        for size in (1, 8):
            cells.append(setting("next-token loss", model, "cola", size, 5, layers=layers, task="causal-lm"))
            cells.append(setting("squared loss", model, "cola", size, 5, layers=layers, loss="squared"))
        cells.append(setting("padded on the left", model, "cola", 8, 5, OFF | {"padding": "left"}, layers=layers))
        cells.append(setting("", model, "rt, 500 tokens", 1, 5, layers=layers))
    return cells + [setting("ReLU", f"random:{RELU}", "cola", size, 5, layers=4) for size in (1, 8)]


def both(cell: Cell) -> list[Cell]:
    """Return a cell of ours beside the same by the released code's rules."""
    more = {key: cell.attack[key] for key in ("max_candidates",) if key in cell.attack}
    title = f"{cell.title}, released rules" if cell.title else "released rules"
    return [cell, replace(cell, title=title, attack=RELEASED | more)]


def released() -> list[Cell]:
    """Ours and the released code's rules on the same batches, 5 or more of a kind; 606 is a draw of its own."""
    sizes = {"minilm": (1, 2, 4, 8), str(FRAMED): (1, 2, 4, 8, 16)}
    return [
        one
        for model, row in sizes.items() for size in row
        for one in both(setting("", model, "cola", size, 8 if size == 1 else 5,
                                attack=SHORT if size > 2 and model == "minilm" else PLAIN, seed=606))
    ]  # fmt: skip


def trained() -> list[Cell]:
    """The released code's rules beside ours where the paper leaves one gradient, with trained weights: eight blocks."""
    framed: dict[str, Any] = {"model": str(FRAMED), "seed": 606, "layers": 8}
    cells = [
        setting(title, data="rt", size=16, batches=5, client=FEDAVG | how, published=value, **framed)
        for title, how, value in fedavg_grid() + [(f"lr {r:g}", {"learning_rate": r}, "") for r in LARGER]
    ]
    cells += [
        setting(f"noise {sigma:g}", data="rt", size=1, batches=5, published=value,
                defense=({"name": "gaussian", "sigma": sigma},), **framed)
        for sigma, value in NOISES
    ]  # fmt: skip
    cells.append(setting("past the width", data="cola", size=64, batches=5, **framed))
    lora = {"rank": 256, "warmup": 10}
    cells.append(setting("ten steps", data="rt", size=16, batches=5, published="94.8", lora=lora, **framed))
    return [one for cell in cells for one in both(cell)]


def adapted() -> list[Cell]:
    """Adapters of rank 256 on the same sentences, with and without a first token, by the number of blocks."""
    lora = {"rank": 256, "warmup": 10}
    return [
        setting(f"{layers} blocks", model, "rt", 16, 2, published="94.8", seed=606, layers=layers, lora=lora)
        for model in (str(FRAMED), "smollm2") for layers in (8, 30)
    ]  # fmt: skip


GROUPS = {
    "exact": exact, "past": past, "curve": curve, "encoders": encoders, "lora": lora, "precision": precision,
    "fedavg": fedavg, "variants": variants, "released": released, "trained": trained, "adapted": adapted,
}  # fmt: skip
COLUMNS = (
    "update", "model", "data", "B", "batches", "load b/d", "R-1", "R-2", "R-L", "exact %", "whole batches", "blind R-L",
    "median s", "published R-1",
)  # fmt: skip


def row(done: Done) -> list[str]:
    """Return a cell's table row."""
    cell, records = done.cell, done.records
    summary = summarize(records)[0]
    scores = [summary.scores[k].mean or 0.0 for k in ("rouge1", "rouge2", "rougeL", "exact")]
    loads = [r.load for r in records]
    layers, lora = cell.more.get("layers"), cell.more.get("lora")
    update = cell.title or "gradient"
    model = "SmolLM2, a first token" if cell.model == str(FRAMED) else cell.model
    if lora:
        least, most = (f(r.tokens for r in records) / lora["rank"] for f in (min, max))
        where = lora.get("modules", "attention")
        update = f"{update}, LoRA r = {lora['rank']} on {where}, tokens/r {least:.1f}-{most:.1f}"
    return [
        update, model if layers is None else f"{model}, {layers} blocks", cell.data, str(cell.size),
        str(len(records)), f"{min(loads):.2f}-{max(loads):.2f}", *(f"{v:.1f}" for v in scores),
        f"{sum(r.scores['exact'] == 100 for r in records)}/{len(records)}",
        f"{summary.baseline['rougeL'].mean or 0:.1f}", f"{summary.seconds:.1f}", cell.published,
    ]  # fmt: skip


def cells(group: str) -> list[Cell]:
    """Return a group's cells, each with the name of its folder."""
    found = []
    for cell in GROUPS[group]():
        adapters = "-".join(map(str, cell.more.get("lora", {}).values()))
        found.append(replace(cell, name=f"{group}-{cell.model}-{cell.data}-{cell.size}-{cell.title}-{adapters}"))
    return found


def words(group: str, given: Options) -> str:
    """Return what stands above a group's table."""
    far = group in ("past", "curve")
    draw = 606 if group in ("released", "trained", "adapted") else 404 if far else 202
    return (
        "Our scoring; the attacker has the weights, and knows batch size and training, not labels or lengths; the word "
        "embedding's gradient is shared, and not read but in rows that say so (the paper does not); failures count 0. "
        f"Draw {draw}: thresholds were developed on 101, what reads under noise on 303"
        f"{', what reads past the width on 202' if far else ''}. Published: DAGER's own, trained GPT-2 (LoRA: "
        "Llama-3.1-8B, encoders: BERT-base), another draw."
    )


def before(group: str, given: Options) -> None:
    """Write the models and texts that a group reads."""
    if group in MAKES:
        MAKES[group]()


MAKES = {"curve": make_narrow, "variants": make, "released": make_framed, "trained": make_framed,
         "adapted": make_framed}  # fmt: skip
PROGRAM = Program(
    about=__doc__,
    groups={group: lambda given, group=group: cells(group) for group in GROUPS},
    columns=COLUMNS,
    table=each(row),
    words=words,
    results=Path("benchmarks/results/dager"),
    records=Path("out/benchmarks/dager"),
    before=before,
)

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
