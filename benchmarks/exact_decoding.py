"""Every cell of exact decoding's table: one row a setting, one file a group in benchmarks/results/exact-decoding/.

    OMP_NUM_THREADS=1 python benchmarks/exact_decoding.py practical rates benchmark decoders compressed partial unseen \
        matrices matrices-p matrices-o matrices-mpnet matrices-b4 matrices-steps matrices-decoder left-alone load \
        past-half stock freezing tables crowded head

Groups: practical (dropout on, embeddings frozen, batch size 1 to 32, two widths), rates (dropout 0.2 to 0.4), benchmark
(dropout off, three data sets), decoders, compressed (noise, sign, top-k, int8, bf16), partial (one block, one matrix),
unseen (another draw), matrices, matrices-p, matrices-o, matrices-mpnet and matrices-b4 (any one matrix, draws of their
own), matrices-steps (of an optimizer's step), matrices-decoder (of a decoder), left-alone (what a defense leaves
alone), load (dropout on, to twice as many tokens as coordinates), past-half (dropout on, half to seven tenths),
stock (the same and more, embeddings trained), freezing (what a frozen part leaves), tables (the embedding tables),
crowded (long sentences and many), head (the head alone, biases and norms, by `exchange`). Records go to out/benchmarks
(a run that was stopped goes on there) and hold no text. Failures count 0.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from grid import OFF, PRACTICAL, Cell, Done, Program, each, main

from gradaudit.metrics.summary import summarize
from gradaudit.models.views import ROLES

GRAB = {1: "78.2", 2: "69.0", 4: "62.8", 8: "54.8", 16: "54.9", 32: "46.4"}
DAGER = {("cola", 4): "94.0", ("cola", 8): "67.8", ("sst2", 4): "95.6", ("sst2", 8): "74.1", ("rt", 4): "66.8",
         ("rt", 8): "37.1"}  # fmt: skip
RATES = {0.2: "72.5", 0.3: "58.4", 0.4: "42.8"}


def practical() -> list[Cell]:
    """Dropout 0.1 on, embeddings frozen."""
    cells = [Cell("cola", b, 20, PRACTICAL, published=f"Grab R-L {GRAB[b]}") for b in (1, 2, 4, 8)]
    cells += [Cell("sst2", 4, 20, PRACTICAL), Cell("sst2", 8, 10, PRACTICAL), Cell("rt", 4, 10, PRACTICAL)]
    cells.append(Cell("rt", 8, 5, PRACTICAL))
    for model, sizes in (("minilm", {16: 8, 20: 2, 24: 1}), ("mpnet", {8: 2, 16: 2, 32: 1})):
        for b, n in sizes.items():
            cells.append(Cell("cola", b, n, PRACTICAL, model, published=f"Grab R-L {GRAB.get(b, '-')}"))
    return cells


def rates() -> list[Cell]:
    """Higher dropout rates."""
    return [
        Cell("cola", b, n, PRACTICAL | {"dropout_rate": p}, published=f"Grab R-L {RATES[p]}" if b == 1 else "")
        for b, n in ((1, 20), (4, 10))
        for p in RATES
    ]


def benchmark() -> list[Cell]:
    """Dropout off, encoder."""
    cells = [
        Cell(data, b, n, OFF, published=f"DAGER (BERT) R-1 {DAGER.get((data, b), '-')}")
        for b, n in ((1, 20), (2, 20), (4, 20), (8, 20))
        for data in ("cola", "sst2", "rt")
    ]
    # Rotten Tomatoes at 16 has more tokens than MiniLM is wide
    return [*cells, Cell("cola", 16, 5), Cell("sst2", 16, 3), Cell("rt", 8, 2, model="mpnet"),
            Cell("rt", 16, 1, model="mpnet")]  # fmt: skip


def decoders() -> list[Cell]:
    """Decoders, dropout off, and GPT-2 with its dropout before the LayerNorm."""
    cells = [Cell("cola", b, 5 if b < 16 else 1, OFF, "smollm2") for b in (1, 4, 16, 32, 50)]
    cells += [Cell("cola", b, 3 if b < 16 else 1, OFF, "random:gpt2") for b in (1, 4, 16, 32, 64)]
    on = {"dropout": True}
    cells += [Cell("cola", b, n, on, "random:gpt2") for b, n in ((1, 5), (4, 5), (16, 1), (32, 1), (36, 1), (40, 1))]
    return cells


def compressed() -> list[Cell]:
    """Noise and compression, dropout off: the words that stand out (a bag, so ROUGE-L says little)."""
    defenses: tuple[dict[str, Any], ...] = (
        {"name": "sign"},
        {"name": "topk", "keep": 0.1},
        {"name": "topk", "keep": 0.01},
        {"name": "gaussian", "sigma": 0.1, "relative": True},
        {"name": "gaussian", "sigma": 0.5, "relative": True},
        {"name": "quantize", "bits": 8},
        {"name": "quantize", "bits": 16},
    )
    return [Cell("cola", b, 4 if b == 1 else 2, OFF, defense=(d,)) for d in defenses for b in (1, 4)]


def partial() -> list[Cell]:
    """One block, or one matrix of it; what the method cannot read counts 0."""
    views = ("0-2:q", "0-1:q,k,v", "0:q,k,v", "0:q", "0:k", "0:v", "0:o", "0:f", "0:p")
    views += tuple(f"{block}:q,k,v" for block in range(1, 6))
    return [Cell("cola", b, 2, dict(how), tensors=t) for how in (PRACTICAL, OFF) for t in views for b in (1, 4)]


def unseen() -> list[Cell]:
    """Batches of draws that nothing was developed on."""
    cells = [Cell("cola", b, n, PRACTICAL, seed=202) for b, n in ((8, 5), (16, 2))]
    cells += [Cell(data, b, 5, seed=202) for data, b in (("rt", 4), ("rt", 8), ("sst2", 8), ("cola", 8))]
    defenses = [{"name": "sign"}, {"name": "topk", "keep": 0.1}, {"name": "gaussian", "sigma": 0.5, "relative": True}]
    cells += [Cell("sst2", 1, 4, seed=202, defense=(d,)) for d in defenses]
    return [*cells, Cell("sst2", 4, 2, seed=202, defense=({"name": "quantize", "bits": 8},))]


def matrices() -> list[Cell]:
    """Any one matrix, dropout off, one sentence: every block and role, a draw that nothing was developed on."""
    return [Cell("cola", 1, 16, OFF, tensors=f"{block}:{role}", seed=16161) for block in range(6) for role in ROLES]


def matrices_p() -> list[Cell]:
    """The matrix that is hardest to read, in every block but the last, on a draw that came after `matrices`."""
    return [Cell("cola", 1, 16, OFF, tensors=f"{block}:p", seed=17171) for block in range(5)]


def matrices_o() -> list[Cell]:
    """The attention's output matrix, by the values of its heads, on a draw that came after `matrices`."""
    return [Cell("cola", 1, 16, OFF, tensors=f"{block}:o", seed=18181) for block in range(5)]


def matrices_mpnet() -> list[Cell]:
    """Any one matrix of a model of the papers' size."""
    return [Cell("cola", 1, 4, OFF, "mpnet", f"{block}:{role}", seed=18181) for block in range(12) for role in ROLES]


def matrices_b4() -> list[Cell]:
    """Any one matrix of the first three blocks, dropout off, four sentences."""
    return [Cell("cola", 4, 4, OFF, tensors=f"{block}:{role}", seed=16161) for block in range(3) for role in ROLES]


def matrices_on() -> list[Cell]:
    """One matrix, dropout on: block by block, by the rate, MPNet, then several sentences, on an unseen draw."""
    ends = [("minilm", f"{block}:{role}", 0.1, 8) for block in range(6) for role in "qfpo" if block or role != "q"]
    rates = [("minilm", f"{block}:q", rate, 8) for block in (1, 3) for rate in (0.2, 0.3, 0.4)]
    deep = [("mpnet", f"{block}:{role}", 0.1, 4) for block in (1, 4, 8) for role in "qf"]
    cells = [
        Cell("cola", 1, n, PRACTICAL | {"dropout_rate": rate}, model, tensors, seed=27272)
        for model, tensors, rate, n in (*ends, *rates, *deep)
    ]
    how = PRACTICAL | {"dropout_rate": 0.1}
    cells += [Cell("cola", 2, 4, how, tensors=one, seed=27272) for one in ("0:f", "1:q", "3:q")]
    frozen = ("embeddings *:q,k,v", "embeddings 0-4:*")
    how = {"dropout": True}
    cells += [Cell("cola", 1, 16, how, seed=27272, defense=({"name": "freeze", "what": one},)) for one in frozen]
    return cells + [
        Cell("cola", b, 4, PRACTICAL | {"dropout_rate": 0.1}, tensors=f"0:{role}", seed=27272)
        for b in (4, 8)
        for role in "qv"
    ]


def matrices_steps() -> list[Cell]:
    """Any one matrix of the weight change of one step, on a draw that came after the others."""
    some = ("0:f", "1:q", "1:k", "1:p", "2:f", "2:v", "3:q", "3:p", "4:f")
    adamw: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 5e-5}
    sgd: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.01}
    cells = [Cell("cola", 1, 8, OFF | adamw, tensors=one, seed=21212, title="AdamW, 5e-5") for one in some]
    return cells + [Cell("cola", 1, 8, OFF | sgd, tensors=one, seed=21212, title="SGD, 0.01") for one in ("1:q", "2:f")]


def matrices_decoder() -> list[Cell]:
    """Any one matrix of a decoder, on a draw that came after the others."""
    some = ((1, 8, "0:f 0:o 0:p 1:k 1:v 1:f 2:o"), (1, 4, "4:f 8:p"), (4, 2, "0:p 1:v 2:f"), (8, 1, "1:v"))
    return [
        Cell("cola", size, count, OFF, "smollm2", tensors=one, seed=22222)
        for size, count, parts in some for one in parts.split()
    ]  # fmt: skip


def left_alone() -> list[Cell]:
    """A defense that leaves a matrix alone, embeddings frozen; and, where they are sent, the position table."""
    aegis: dict[str, Any] = {"name": "aegis"}
    cells = [Cell("cola", b, n, PRACTICAL | OFF, seed=16161, defense=(aegis,)) for b, n in ((1, 16), (4, 4))]
    return [*cells, *(Cell("cola", 1, 16, {"dropout": on}, seed=18181, defense=(aegis,)) for on in (False, True))]


def freezing() -> list[Cell]:
    """A part that is neither trained nor sent, one sentence, a draw that came after the others."""
    frozen = (
        "embeddings", "*:q,k,v", "embeddings *:q,k,v", "embeddings 0-4:*", "*:* head", "embeddings *:*",
        "position *:* head",
    )  # fmt: skip
    return [
        Cell("cola", 1, 16, how, seed=18181, defense=({"name": "freeze", "what": part},))
        for how in (OFF, {"dropout": True})
        for part in frozen
    ]


def head() -> list[Cell]:
    """What no matrix of a block is part of, read by `exchange`: one sentence, a draw that nothing was developed on."""
    attack = {"name": "exchange"}
    biases: dict[str, Any] = {"name": "freeze", "what": "embeddings *:*"}
    parts: tuple[tuple[bool, str, tuple[dict[str, Any], ...]], ...] = (
        (False, "head", ()),
        (False, "all", (biases,)),
        (False, "5:q", ()),
        (True, "head", ()),
        (True, "all", (biases,)),
    )
    return [
        Cell("cola", 1, 16, {"dropout": on}, tensors=part, seed=28282, defense=frozen, attack=attack)
        for on, part, frozen in parts
    ]


def tables() -> list[Cell]:
    """The embedding tables alone, one sentence, dropout on: a gradient, and changes of weights."""
    adamw = {"dropout": True, "optimizer": "adamw", "learning_rate": 5e-5}
    changes: tuple[dict[str, Any], ...] = (
        {"optimizer": "sgd", "learning_rate": 0.01, "epochs": 5},
        {"learning_rate": 5e-5},
        {"learning_rate": 5e-5, "epochs": 10},
        {"learning_rate": 5e-5, "epochs": 10, "weight_decay": 0.01},
    )
    cells = [Cell(data, 1, 16, {"dropout": True}, tensors="embeddings", seed=18181) for data in ("cola", "sst2", "rt")]
    return cells + [
        Cell("cola", 1, 16, adamw | how, tensors="embeddings", seed=18181, title=changed(adamw | how))
        for how in changes
    ]


def changed(how: Mapping[str, Any]) -> str:
    """Return what a table calls local steps."""
    decay = f", decay {how['weight_decay']}" if "weight_decay" in how else ""
    return f"{how['optimizer']} {how['learning_rate']:g}, {how.get('epochs', 1)} steps{decay}"


def crowded() -> list[Cell]:
    """Long sentences and many of them, dropout off, a draw that nothing was developed on."""
    cells = [Cell("rt", 8, 5, seed=17171), Cell("cola", 16, 3, seed=17171), Cell("sst2", 16, 3, seed=17171)]
    return [*cells, Cell("rt", 8, 3, model="mpnet", seed=17171), Cell("rt", 16, 2, model="mpnet", seed=17171)]


def load() -> list[Cell]:
    """Dropout on, more and more tokens, on a draw that nothing was developed on."""
    sizes = (("minilm", ((24, 3), (32, 3), (48, 3), (64, 2))), ("mpnet", ((48, 2), (64, 3), (128, 2))))
    return [Cell("cola", b, n, PRACTICAL, model, seed=23232) for model, some in sizes for b, n in some]


def past_half() -> list[Cell]:
    """Dropout on, more rows than half the coordinates, on a draw that nothing was developed on."""
    sizes = (("minilm", "cola", 20, 3), ("minilm", "cola", 22, 3), ("minilm", "rt", 8, 3))
    sizes += (("mpnet", "cola", 40, 2), ("mpnet", "cola", 46, 1))
    return [Cell(data, b, n, PRACTICAL, model, seed=25252) for model, data, b, n in sizes]


def stock() -> list[Cell]:
    """Dropout on, everything trained as a stock training loop does, half the width to twice, the same draw."""
    sizes = (("minilm", "cola", 24, 3), ("minilm", "cola", 32, 3), ("minilm", "cola", 48, 3), ("minilm", "rt", 8, 3))
    sizes += (("minilm", "rt", 16, 3), ("mpnet", "cola", 64, 2), ("mpnet", "cola", 128, 1))
    trained = "embeddings trained"
    return [Cell(data, b, n, {"dropout": True}, model, seed=25252, title=trained) for model, data, b, n in sizes]


GROUPS = {
    "practical": practical,
    "rates": rates,
    "benchmark": benchmark,
    "decoders": decoders,
    "compressed": compressed,
    "partial": partial,
    "unseen": unseen,
    "matrices": matrices,
    "matrices-p": matrices_p,
    "matrices-o": matrices_o,
    "matrices-mpnet": matrices_mpnet,
    "matrices-b4": matrices_b4,
    "matrices-on": matrices_on,
    "matrices-steps": matrices_steps,
    "matrices-decoder": matrices_decoder,
    "left-alone": left_alone,
    "load": load,
    "past-half": past_half,
    "stock": stock,
    "crowded": crowded,
    "freezing": freezing,
    "tables": tables,
    "head": head,
}
COLUMNS = (
    "model", "data", "B", "dropout", "tensors", "batches", "load b/d", "R-1", "R-L", "exact %", "proven",
    "proven, wrong", "blind R-L", "median s", "slowest s", "published",
)  # fmt: skip


def row(done: Done) -> list[str]:
    """Return a cell's table row."""
    cell, records = done.cell, done.records
    summary = summarize(records)[0]
    sentences = [s for r in records for s in r.sentences]
    proven = [s for s in sentences if s.certificate == "proven"]
    loads = [r.load for r in records]
    scores = [f"{summary.scores[k].mean or 0:.1f}" for k in ("rouge1", "rougeL", "exact")]
    if (told := summary.scores["rougeL"]).low is not None and told.low != told.high:
        scores[1] += f" [{told.low:.1f}, {told.high:.1f}]"
    # what the attacker sees: the tensors, and what was done to them
    done = [cell.title] if cell.title else []
    done += [f"by {cell.attack['name']}"] if cell.attack["name"] != "decode" else []
    seen = " ".join([cell.tensors, *done, *(str(v) for d in cell.defense for v in d.values())])
    rate = cell.client.get("dropout_rate", 0.1) if cell.client["dropout"] else 0
    return [
        cell.model, cell.data, str(cell.size), f"{rate:g}", seen, str(len(records)),
        f"{min(loads):.2f}-{max(loads):.2f}", *scores, f"{len(proven)}/{len(sentences)}",
        str(sum(not s.exact for s in proven)), f"{summary.baseline['rougeL'].mean or 0:.1f}",
        f"{summary.seconds:.1f}", f"{max(r.seconds for r in records):.0f}", cell.published,
    ]  # fmt: skip


def name(cell: Cell) -> str:
    """Return the name of a cell's folder, which exact_decoding_figures.py reads."""
    parts = [cell.attack["name"], cell.model.replace(":", "-"), cell.data, f"b{cell.size}"]
    parts.append("on" if cell.client["dropout"] else "off")
    if "dropout_rate" in cell.client:
        parts.append(f"p{cell.client['dropout_rate']}")
    if cell.tensors != "all":
        parts.append(cell.tensors.replace(":", "-").replace(",", ""))
    if cell.seed != 101:
        parts.append(f"draw{cell.seed}")
    if cell.title:
        parts.append(cell.title.replace(",", "").replace(" ", "-"))
    return "-".join([*parts, *("-".join(str(v) for v in d.values()) for d in cell.defense)])


PROGRAM = Program(
    about=__doc__,
    groups={
        group: lambda given, make=make: [replace(c, name=name(c)) for c in make()] for group, make in GROUPS.items()
    },
    columns=COLUMNS,
    table=each(row),
    words=lambda group, given: (
        "Our scoring; labels and lengths unknown, batch size and dropout rate known; failures count 0."
    ),
    results=Path("benchmarks/results/exact-decoding"),
)

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
