"""LTI for text: windows of WikiText, LTI's own target, four defenses, its baselines; the paper's numbers beside ours.

    OMP_NUM_THREADS=1 python benchmarks/lti_text.py defenses rows

Groups: `defenses` (LTI-P and LTI by layers and by the paper's network, TAG, decode, exchange and blind under each
defense; `--only layers-p,layers,blind,decode,tag` leaves out the network, which takes a quarter of an hour a cell,
LTI-P by layers with three times the epochs or with words in pieces, both with word pairs, and TAG from LAMP's start),
`rows` (LTI by layers, by the number of public windows), `speed` (simulated updates a second, one by one and many at a
time). Run again to go on: a finished cell is read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from grid import Cell, Done, Options, Program, each, made, main, markdown, write_table
from transformers import GPT2Config, GPT2Tokenizer

from gradaudit.audit.fitting import INVERTERS, fitted
from gradaudit.audit.prepare import pick_device, prepare
from gradaudit.audit.run import run
from gradaudit.case import parse_case
from gradaudit.client.client import Client
from gradaudit.client.simulate_text import ClientSimulation
from gradaudit.data.spec import SourceSpec
from gradaudit.data.text import load_rows
from gradaudit.learned.text.features import hashed, sizes_of
from gradaudit.learned.text.hashing import Hash
from gradaudit.metrics.summary import summarize
from gradaudit.models.packages import gpt2_vocabulary_folder
from gradaudit.record import Record
from gradaudit.registry import build, describe
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Batch

WORDS, LENGTH = 5000, 16
PUBLIC = {"source": "wikitext-2", "split": "validation"}
PRIVATE = {"source": "wikitext-2", "split": "test"}
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


def setting(given: Options, attack: str, defense: str, rows: int | None = None) -> Cell:
    """Return an attack on windows under a defense, with so many public windows (None: all)."""
    windows = given.slow if attack in SLOW else given.some if attack in SOME else given.windows
    public = PUBLIC | {"shuffle_seed": 101} | ({"rows": rows} if rows else {})
    drawn = {"window": LENGTH, "shuffle_seed": 202 if attack in SOME else 101, "batches": windows}
    more: dict[str, Any] = {"task": "causal-lm", "data": PRIVATE | drawn}
    more["knowledge"] = {"lengths": True}  # TAG takes them from it; LTI has a window's length by its making
    if ATTACKS[attack]["name"] == "lti":
        more["public"] = public
    return Cell(
        model=f"random:{target(given)}", batches=windows, client={"freeze": ["word", "head"]},
        defense=DEFENSES[defense], title=f"{attack}, {defense}", attack=ATTACKS[attack], more=more,
        facts={"attack": attack, "defense": defense, "rows": rows},
    )  # fmt: skip


def target(given: Options) -> Path:
    """Return the folder of the model that is attacked."""
    return Path(given.out) / ("model" if given.deviation == 0.02 else f"model-{given.deviation:g}")


def make_model(folder: Path, deviation: float) -> None:
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
    for line in "\n".join(load_rows(SourceSpec.model_validate(PUBLIC), Path.cwd()).texts).splitlines():
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


def further(given: Options, cell: Cell, ready: Any) -> list[Record]:
    """Return records of private windows after the cell's own, read by the inverter that the cell has fitted.

    Fewer windows than a comparison needs were drawn when the inverters were fitted; these take seconds, a fit minutes.
    """
    case = ready.case
    if not given.further or case.attack["name"] != "lti":
        return []
    known = fitted(ready, given.out / INVERTERS).attack
    data = cell.case()
    data["data"] = data["data"] | {"skip": case.data.batches, "batches": given.further}
    data["attack"] = describe(known)
    del data["public"]
    more = parse_case(data)
    return list(run(prepare(more, Path.cwd(), ready.device, ready.model), given.out / more.content_hash()))


LEARNED = (
    "layers-p", "layers", "layers-pieces", "layers-pairs", "layers-pieces-pairs", "layers-p-long", "layers-p-wide",
    "layers-wide",
)  # fmt: skip
OTHERS = ("lti-p-wide", "lti-wide", "lti-p", "lti", "blind", "decode", "exchange", "tag", "tag-lamp")


def defenses(given: Options) -> list[Cell]:
    """Every attack under every defense; what learns first."""
    return chosen(given, [(a, d, FEW if a in LEARNED else None) for a in LEARNED + OTHERS for d in DEFENSES])


def rows(given: Options) -> list[Cell]:
    """LTI by layers with 500 public windows up to all, as many epochs each."""
    return chosen(given, [("layers", "sign", n) for n in (500, 1000, 2000, 4000, 8000, None)])


def chosen(given: Options, every: list[tuple[str, str, int | None]]) -> list[Cell]:
    """Return the cells that `--only` and `--under` leave."""
    attacks, under = given.only or list(ATTACKS), given.under or list(DEFENSES)
    return [setting(given, a, d, n) for a, d, n in every if a in attacks and d in under]


def names_of(known: dict[str, Any]) -> Any:
    """Return what reads names joined by commas from the command line."""

    def read(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(known)}")
        return text.split(",")

    return read


SETTING = (
    f"Windows of {LENGTH} tokens of WikiText-2: private ones of its test split, public ones of its validation split, "
    "which share no "
    "eight tokens in a row with a private one. Target: 3 blocks, width 96, random weights (deviation {deviation}), "
    f"pre-norm, causal, {WORDS} of GPT-2's tokens that are frequent in the public split; word embedding and output "
    "layer frozen, next-token loss, B = 1. Failures count 0; accuracy is by position. LTI's network: "
    f"{json.dumps(NET)}; by layers: {json.dumps(LAYERS)}. "
    "Published: LTI's own table: 50,257 tokens, bins 10% of the size, more text, more epochs."
)
COLUMNS = (
    "defense", "attack", "public windows", "private windows", "accuracy", "R-1", "R-2", "R-L", "blind accuracy",
    "blind R-L", "s training", "s a window", "failed", "published: accuracy/R-1/R-2/R-L",
)  # fmt: skip


def row(done: Done) -> list[str]:
    """Return a cell's table row."""
    attack, defense, wanted = (done.cell.facts[key] for key in ("attack", "defense", "rows"))
    summary = summarize(done.records)[0]
    scores = [summary.scores[k].mean or 0.0 for k in ("token_accuracy", "rouge1", "rouge2", "rougeL")]
    scores += [summary.baseline[k].mean or 0.0 for k in ("token_accuracy", "rougeL")]
    public = done.records[0].knowledge.get("public", {}).get("rows", "none")
    said = PUBLISHED.get(SAME.get(attack, attack), ("",) * 5)[PLACES[defense]] if wanted in (None, FEW) else ""
    return [
        defense, attack, str(public), str(len(done.records)), *(f"{v:.1f}" for v in scores),
        "" if done.learning is None else f"{done.learning:.0f}", f"{summary.seconds:.2f}", str(summary.failed), said,
    ]  # fmt: skip


def speed(given: Options) -> None:
    """Simulate the same updates one by one and many at a time, hashed, and write gradients a second."""
    make_model(target(given), given.deviation)
    case = parse_case(setting(given, "lti", "none").case())
    ready = prepare(case, Path.cwd(), pick_device(given.device))
    model, public, lines = ready.model, ready.public, []
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
                        batch = Batch(texts.ids[n : n + 1].cpu(), texts.mask[n : n + 1].cpu(), None, ())
                        update = client.update(batch, stream(turn, "speed", n)).tensors
                        hash_(((k, update[v.parameter][None]) for k, v in simulation.views.items()), 1)
                best = min(best, (time.perf_counter() - began) / len(texts))
            rates.append(1 / best)
        lines.append([name, *(f"{rate:.0f}" for rate in rates), f"{rates[1] / rates[0]:.1f}"])
        print(lines[-1], flush=True)
    head = f"{made(ready.device)} Client and hash; the best of three turns of 128 updates."
    columns = ("defense", "one by one, updates/s", "together, updates/s", "times")
    write_table(given.write / "speed.md", head, markdown(columns, lines))


def options(parser: argparse.ArgumentParser) -> None:
    """Add what this program takes."""
    parser.add_argument("--windows", type=int, default=200, help="private windows a cell")
    parser.add_argument("--further", type=int, default=0, help="private windows more, read by what a cell has learned")
    parser.add_argument("--some", type=int, default=20, help=f"the same of {' and '.join(SOME)}")
    parser.add_argument("--slow", type=int, default=10, help=f"the same of {' and '.join(SLOW)}")
    parser.add_argument("--only", type=names_of(ATTACKS), help="only these attacks, as lti,lti-p")
    parser.add_argument("--under", type=names_of(DEFENSES), help="only under these defenses, as none,sign")
    deviation = "of the target's random weights; GPT-2's (PyTorch's own: .06 to .1)"
    parser.add_argument("--deviation", type=float, default=0.02, help=deviation)


PROGRAM = Program(
    about=__doc__,
    groups={"defenses": defenses, "rows": rows},
    columns=COLUMNS,
    table=each(row),
    words=lambda group, given: SETTING.replace("{deviation}", f"{given.deviation:g}"),
    results=Path("benchmarks/results/lti"),
    records=Path("out/benchmarks/lti"),
    options=options,
    before=lambda group, given: make_model(target(given), given.deviation),
    shared_inverters=True,
    further=further,
    measured={"speed": speed},
)

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
