"""LTI for text: windows of WikiText, LTI's own target, four defenses, its baselines; the paper's numbers beside ours.

    OMP_NUM_THREADS=1 python benchmarks/lti_text.py defenses rows --data /work/shared/data/wikitext2

Groups: `defenses` (LTI-P and LTI by layers and by the paper's network, TAG, decode, exchange and blind under each
defense; `--only layers-p,layers,blind,decode,tag` leaves out the network, which takes a quarter of an hour a cell,
LTI-P by layers with three times the epochs or with words in pieces, both with word pairs, and TAG from LAMP's start),
`rows` (LTI by layers, by the number of public windows), `speed` (simulated updates a second, one by one and many at a
time). Run again to go on: a finished cell is read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tables import command, commit, write_table
from transformers import GPT2Config, GPT2Tokenizer

from gradaudit.audit.fitting import INVERTERS, fitted
from gradaudit.audit.prepare import Prepared, pick_device, prepare
from gradaudit.audit.run import run
from gradaudit.case import parse_case
from gradaudit.client.client import Client
from gradaudit.client.simulate_text import ClientSimulation, _batch
from gradaudit.errors import AuditError
from gradaudit.learned.text.features import hashed, sizes_of
from gradaudit.learned.text.hashing import Hash
from gradaudit.machine import ready_process
from gradaudit.metrics.summary import summarize
from gradaudit.models.packages import gpt2_vocabulary_folder
from gradaudit.models.transformers import TransformersModel
from gradaudit.record import Record
from gradaudit.registry import build, describe
from gradaudit.selection import Selection
from gradaudit.streams import stream

WORDS, LENGTH = 5000, 16
PUBLIC, PRIVATE = "wiki.valid.tokens", "wiki.test.tokens"
DEFENSES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "sign": [{"name": "sign"}],
    "pruning 0.99": [{"name": "topk", "keep": 0.01}],
    "Gaussian 0.01": [{"name": "gaussian", "sigma": 0.01}],
    "pruning 0.99 of the whole": [{"name": "topk", "keep": 0.01, "whole": True}],
}
PLACES = {"none": 0, "sign": 1, "pruning 0.99": 2, "Gaussian 0.01": 3, "pruning 0.99 of the whole": 2}
"""Of a defense in a row of `PUBLISHED`, which does not say what is pruned by itself."""
PUBLISHED = {
    "tag": ("74.13/71.92/50.64/68.46", "0.00/0.06/0.00/0.06", "34.34/48.50/10.21/35.60", "64.34/66.19/37.86/59.55"),
    "lti": ("89.61/86.13/79.53/86.11", "71.15/63.17/43.51/63.11", "66.79/58.31/37.58/58.21", "82.08/76.55/63.38/76.52"),
    "lti-p": ("91.14/89.43/85.11/89.41", "88.06/84.66/76.46/84.64", "86.19/82.56/73.04/82.50",
              "90.25/87.39/81.94/87.34"),
}  # fmt: skip
"""Accuracy / ROUGE-1 / ROUGE-2 / ROUGE-L (Wu et al., arXiv 2210.10880), in the order of `DEFENSES`."""
SAME = {
    "layers": "lti", "layers-pairs": "lti", "layers-wide": "lti", "lti-wide": "lti", "layers-p": "lti-p",
    "layers-p-long": "lti-p", "layers-pieces": "lti-p", "layers-pieces-pairs": "lti-p", "layers-p-wide": "lti-p",
    "lti-p-wide": "lti-p", "tag-lamp": "tag",
}  # fmt: skip
"""What of ours stands beside what of theirs, where names differ."""
NET: dict[str, Any] = {
    "name": "lti", "share": 0.01, "bottleneck": 1000, "width": 192, "own_words": True, "learning_rate": 1e-3,
    "patience": 0,
}  # fmt: skip
"""What fits ten minutes of one core; chosen on windows held out of the public split."""
LAYERS: dict[str, Any] = {
    "name": "lti", "learner": "layers", "share": 0.01, "bottleneck": 600, "width": 192, "learning_rate": 1e-3,
    "epochs": 6, "patience": 0,
}  # fmt: skip
"""Ours, of three minutes; chosen on windows held out of the public split."""
ATTACKS: dict[str, dict[str, Any]] = {
    "layers-p": LAYERS | {"pseudo": True},  # new windows in every epoch
    "layers-pieces": LAYERS | {"pseudo": True, "piece": 4.0},
    "layers-pieces-pairs": LAYERS | {"pseudo": True, "piece": 4.0, "pairs": True},
    "layers-pairs": LAYERS | {"pairs": True},
    "layers-p-long": LAYERS | {"pseudo": True, "epochs": 18},
    "layers": LAYERS,
    "layers-wide": LAYERS | {"share": 0.05},
    "layers-p-wide": LAYERS | {"pseudo": True, "share": 0.05},
    "lti-p": NET | {"pseudo": True, "epochs": 5},
    "lti": NET | {"epochs": 7},
    # noise is told from words by how many bins there are: half the paper's share of them, and its bottleneck
    "lti-p-wide": NET | {"pseudo": True, "epochs": 5, "share": 0.05, "bottleneck": 600},
    "lti-wide": NET | {"epochs": 7, "share": 0.05, "bottleneck": 600},
    # the word table's deviation is 0.02 here: a start of deviation 1 and a rate of 0.1, made for BERT's, read nothing
    "tag": {"name": "tag", "start": 0.0, "learning_rate": 0.01},
    "tag-lamp": {"name": "tag"},
    "exchange": {"name": "exchange"},
    "decode": {"name": "decode"},
    "blind": {"name": "blind"},
}
SLOW = ("tag", "tag-lamp")
SOME = ("decode", "exchange")
"""On windows of a draw of their own: some of the others were seen while `exchange` was made."""
FEW = 6000
"""Public windows of a cell by layers."""


@dataclass(frozen=True)
class Cell:
    """One row of a table: an attack on windows under a defense, with so many public windows (None: all)."""

    attack: str
    defense: str
    rows: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def case(self, data: Path, model: Path, windows: int) -> dict[str, Any]:
        """The case file's content."""
        attack = ATTACKS[self.attack] | self.fields
        drawn = 202 if self.attack in SOME else 101
        public = {"path": str(data / PUBLIC), "shuffle_seed": 101} | ({"rows": self.rows} if self.rows else {})
        return {
            "name": f"{self.attack}, {self.defense}",
            "model": f"random:{model}",
            "task": "causal-lm",
            "data": {"path": str(data / PRIVATE), "window": LENGTH, "shuffle_seed": drawn, "batches": windows},
            "client": {"freeze": ["word", "head"]},
            # TAG takes lengths from it; LTI has a window's length by its making
            "knowledge": {"lengths": True},
            "defense": DEFENSES[self.defense],
            "attack": attack,
            "metrics": {"diagnose": False},
        } | ({"public": public} if attack["name"] == "lti" else {})


def make_model(data: Path, folder: Path, deviation: float) -> None:
    """Write LTI's target: GPT-2's shape at its sizes, and GPT-2's tokenizer cut to the public split's frequent tokens.

    Tokens are taken by their frequency in the public split, each with the pieces that it is merged from, until there
    are `WORDS`; other merges are left out. So every text has tokens, and none is unknown: rare words come in pieces.
    """
    if (folder / "config.json").exists():
        return
    source = gpt2_vocabulary_folder()
    merges = [tuple(line.split(" ")) for line in (source / "merges.txt").read_text(encoding="utf8").splitlines()[1:]]
    merges = [pair for pair in merges if len(pair) == 2]
    made_of = {first + second: (first, second) for first, second in reversed(merges)}
    whole = GPT2Tokenizer(vocab=str(source / "vocab.json"), merges=str(source / "merges.txt"))
    found: Counter[str] = Counter()
    for line in (data / PUBLIC).read_text(encoding="utf8").splitlines():
        found.update(whole.convert_ids_to_tokens(whole(line, verbose=False)["input_ids"]))
    every: dict[str, int] = json.loads((source / "vocab.json").read_text(encoding="utf8"))
    end = "<|endoftext|>"
    kept = dict.fromkeys(token for token in every if token not in made_of and token != end)
    for token, _ in found.most_common():
        need, todo = [], [token]
        while todo:
            one = todo.pop()
            if one not in kept and one not in need:
                need.append(one)
                todo += made_of.get(one, ())
        if len(kept) + len(need) <= WORDS:
            kept |= dict.fromkeys(need)
    ids = {token: n for n, token in enumerate([end, *sorted(kept, key=every.__getitem__)])}
    cut = [pair for pair in merges if pair[0] + pair[1] in ids and pair[0] in ids and pair[1] in ids]
    GPT2Tokenizer(vocab=ids, merges=cut).save_pretrained(folder)
    GPT2Config(
        vocab_size=len(ids), n_positions=LENGTH, n_embd=96, n_layer=3, n_head=8, n_inner=1536,
        activation_function="relu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0, initializer_range=deviation,
    ).save_pretrained(folder)  # fmt: skip


def further(cell: Cell, ready: Prepared, out: Path, number: int) -> list[Record]:
    """Return records of private windows after the cell's own, read by the inverter that the cell has fitted.

    Fewer windows than a comparison needs were drawn when the inverters were fitted; these take seconds, a fit minutes.
    """
    case = ready.case
    known = fitted(ready.attack, ready.client, ready.selection, ready.public, 1, case.seed, out / INVERTERS)
    data = cell.case(Path(case.data.path or "").parent, out / "model", number)
    data["model"] = case.model
    data["data"] |= {"skip": case.data.batches}
    data["attack"] = describe(known)
    del data["public"]
    more = parse_case(data)
    return list(run(prepare(more, Path.cwd(), ready.device, ready.model), out / more.content_hash()))


def defenses() -> list[Cell]:
    """Every attack under every defense; what learns first."""
    ours = [
        Cell(attack, defense, FEW)
        for attack in (
            "layers-p",
            "layers",
            "layers-pieces",
            "layers-pairs",
            "layers-pieces-pairs",
            "layers-p-long",
            "layers-p-wide",
            "layers-wide",
        )
        for defense in DEFENSES
    ]
    return ours + [
        Cell(attack, defense)
        for attack in ("lti-p-wide", "lti-wide", "lti-p", "lti", "blind", "decode", "exchange", "tag", "tag-lamp")
        for defense in DEFENSES
    ]


def rows() -> list[Cell]:
    """LTI by layers with 500 public windows up to all, as many epochs each."""
    return [Cell("layers", "sign", n) for n in (500, 1000, 2000, 4000, 8000, None)]


GROUPS = {"defenses": defenses, "rows": rows}
SETTING = (
    f"Windows of {LENGTH} tokens of WikiText-2: private ones of {PRIVATE}, public ones of {PUBLIC}, which share no "
    "eight tokens in a row with a private one. Target: 3 blocks, width 96, random weights (deviation {deviation}), "
    f"pre-norm, causal, {WORDS} of GPT-2's tokens that are frequent in the public split; word embedding and output "
    "layer frozen, next-token loss, B = 1. Failures count 0; accuracy is by position. LTI's network: "
    f"{json.dumps(NET)}; by layers: {json.dumps(LAYERS)}. "
    "Published: LTI's own table: 50,257 tokens, bins 10% of the size, more text, more epochs."
)
HEADER = (
    "| defense | attack | public windows | private windows | accuracy | R-1 | R-2 | R-L | blind accuracy | blind R-L "
    "| s training | s a window | failed | published: accuracy/R-1/R-2/R-L |\n" + "|---" * 14 + "|"
)


def row(cell: Cell, records: list[Record], seconds: float | None) -> str:
    """Return the cell's table row."""
    summary = summarize(records)[0]
    scores = [summary.scores[k].mean or 0.0 for k in ("token_accuracy", "rouge1", "rouge2", "rougeL")]
    blind = [summary.baseline[k].mean or 0.0 for k in ("token_accuracy", "rougeL")]
    public = records[0].knowledge.get("public", {}).get("rows", "none")
    published = (
        PUBLISHED.get(SAME.get(cell.attack, cell.attack), ("",) * 5)[PLACES[cell.defense]]
        if cell.rows in (None, FEW)
        else ""
    )
    return (
        f"| {cell.defense} | {cell.attack} | {public} | {len(records)} | {' | '.join(f'{v:.1f}' for v in scores)} "
        f"| {' | '.join(f'{v:.1f}' for v in blind)} | {'' if seconds is None else f'{seconds:.0f}'} "
        f"| {summary.seconds:.2f} | {summary.failed} | {published} |"
    )


def speed(model: TransformersModel, public: Any, write: Path, about: str) -> None:
    """Simulate the same updates one by one and many at a time, hashed, and write gradients a second."""
    lines = ["| defense | one by one, updates/s | together, updates/s | times |", "|---|---|---|---|"]
    for name, tables in DEFENSES.items():
        behind = tuple(build("defense", d["name"], {k: v for k, v in d.items() if k != "name"}) for d in tables)
        client = Client(model, freeze=("word", "head"), defenses=behind)
        simulation = ClientSimulation(client, Selection("all"))
        hash_ = Hash(sizes_of(simulation.shapes), 10_000, 0)
        texts = public.take(torch.arange(128))
        rates = []
        for together in (False, True):
            best = float("inf")
            for turn in range(3):
                began = time.perf_counter()
                if together:
                    hashed(simulation, hash_, texts, 1, stream(turn, "speed"))
                else:
                    for n in range(len(texts)):
                        batch = _batch(texts.ids[n : n + 1], texts.mask[n : n + 1], None)
                        update = client.update(batch, stream(turn, "speed", n)).tensors
                        hash_(((k, update[v.parameter][None]) for k, v in simulation.views.items()), 1)
                best = min(best, (time.perf_counter() - began) / len(texts))
            rates.append(1 / best)
        lines.append(f"| {name} | {rates[0]:.0f} | {rates[1]:.0f} | {rates[1] / rates[0]:.1f} |")
        print(lines[-1], flush=True)
    write_table(
        write / "speed.md", f"{about} Client and hash; the best of three turns of 128 updates.", "\n".join(lines)
    )


def main() -> None:
    """Run the groups and write a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=[*GROUPS, "speed"])
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {PUBLIC} and {PRIVATE}")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/lti"), help="records, inverters and the model")
    parser.add_argument("--write", type=Path, default=Path("benchmarks/results/lti"), help="tables' folder")
    parser.add_argument("--windows", type=int, default=200, help="private windows a cell")
    parser.add_argument("--further", type=int, default=0, help="private windows more, read by what a cell has learned")
    parser.add_argument("--some", type=int, default=20, help=f"the same of {' and '.join(SOME)}")
    parser.add_argument("--slow", type=int, default=10, help=f"the same of {' and '.join(SLOW)}")
    parser.add_argument("--only", default="", help="only these attacks, as lti,lti-p")
    parser.add_argument("--under", default="", help="only under these defenses, as none,sign")
    parser.add_argument(
        "--deviation",
        type=float,
        default=0.02,
        help="of the target's random weights; GPT-2's (PyTorch's own: .06 to .1)",
    )
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    for name in filter(None, given.only.split(",")):
        if name not in ATTACKS:
            parser.error(f"--only: '{name}' is none of {', '.join(ATTACKS)}")
    for name in filter(None, given.under.split(",")):
        if name not in DEFENSES:
            parser.error(f"--under: '{name}' is none of {', '.join(DEFENSES)}")
    ready_process()
    device = pick_device(given.device)
    folder = given.out / ("model" if given.deviation == 0.02 else f"model-{given.deviation:g}")
    make_model(given.data, folder, given.deviation)
    setting = SETTING.replace("{deviation}", f"{given.deviation:g}")
    about = f"Made by `{command()}` (commit {commit()}) on {device}, {torch.get_num_threads()} thread(s)."
    loaded: TransformersModel | None = None
    for group in given.groups:
        if group == "speed":
            ready = prepare(parse_case(Cell("lti", "none").case(given.data, folder, 1)), Path.cwd(), device, loaded)
            loaded = ready.model
            speed(ready.model, ready.public, given.write, about)
            continue
        lines = []
        for cell in GROUPS[group]():
            if given.only and cell.attack not in given.only.split(","):
                continue
            if given.under and cell.defense not in given.under.split(","):
                continue
            count = given.slow if cell.attack in SLOW else given.some if cell.attack in SOME else given.windows
            case = parse_case(cell.case(given.data, folder, count))
            ready = prepare(case, Path.cwd(), device, loaded)
            loaded = ready.model
            place = given.out / case.content_hash()
            note = place / "training.txt"
            began = time.perf_counter()
            records: list[Record] = []
            try:
                for record in run(ready, place, inverters=given.out / INVERTERS):
                    if not records and not note.exists() and ready.attack.unfitted:
                        note.write_text(f"{time.perf_counter() - began - record.seconds:.1f}")
                    records.append(record)
            except AuditError as error:
                print(f"{cell.attack}, {cell.defense}: {error}", flush=True)
                continue
            seconds = float(note.read_text()) if note.exists() else None
            if given.further and case.attack["name"] == "lti":
                records += further(cell, ready, given.out, given.further)
            lines.append(row(cell, records, seconds))
            print(lines[-1], flush=True)
            write_table(given.write / f"{group}.md", f"{about} {setting}", "\n".join([HEADER, *lines]))


if __name__ == "__main__":
    main()
