"""Draws how well entries of a gradient are known through each kind of update, and what tells the step of a word.

    pip install 'gradaudit[figures]'; python benchmarks/real_updates_figures.py

Writes docs/real-updates-entries.svg (from the maps in `leakage/uneven/steps.py` and one gradient of MiniLM on embedded
sentences) and docs/real-updates-steps.svg (from `leakage/uneven/words.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from grid import options

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.leakage.uneven.entries import grid
from gradaudit.leakage.uneven.steps import AdamStep
from gradaudit.leakage.uneven.words import moved
from gradaudit.types import LocalTraining

try:
    import matplotlib
except ImportError:
    sys.exit("drawing needs matplotlib: pip install 'gradaudit[figures]'")
matplotlib.use("svg")
from matplotlib import pyplot

DOCS = Path(__file__).parent.parent / "docs"
WEIGHT = torch.tensor(0.04)
"""A weight of MiniLM's attention of middling size."""
SIZES = torch.logspace(-9, -3, 300, dtype=torch.double)


def relative_errors() -> dict[str, torch.Tensor]:
    """Return the standard deviation of an entry over its size, by kind of update, at each size of `SIZES`."""
    width = float(grid(WEIGHT[None])[0]) / 12**0.5
    found = {}
    for rate in (5e-5, 1e-5):
        slope = AdamStep().slope(SIZES)
        found[f"AdamW's first step, {rate:g}"] = width / rate / slope / SIZES
    for rate in (1e-1, 1e-2, 1e-3):
        found[f"SGD, {rate:g}"] = width / rate / SIZES
    found["bf16"] = torch.full_like(SIZES, 2.0**-8 / 12**0.5)
    return found


def gradient_sizes() -> torch.Tensor:
    """Return the sizes of the entries of block 0's query, key and value gradients, four embedded sentences."""
    ready = prepare(
        parse_case({"data": {"batch_size": 4}, "client": {"dropout": True}, "attack": {"name": "blind"}}),
        Path.cwd(),
        torch.device("cpu"),
    )
    _, seen = sent(ready, private_batch(ready, 0), 0)
    return torch.cat([t.abs().flatten() for role in "qkv" for t in seen.role(0, role)]).double()


def entries() -> None:
    """Draw the errors over the sizes that there are."""
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for (name, values), mark in zip(
        relative_errors().items(), ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1))), strict=True
    ):
        axes.loglog(SIZES, values, linestyle=mark, label=name)
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set(ylim=(1e-4, 1e2), xlabel="size of the gradient's entry", ylabel="its error, relative")
    beside = axes.twinx()
    sizes = gradient_sizes().log10()
    beside.hist(10 ** sizes.clamp(-9, -3), bins=10 ** torch.linspace(-9, -3, 60).numpy(), color="0.85", zorder=0)
    beside.set_yticks([])
    axes.set_zorder(beside.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCS / "real-updates-entries.svg", metadata={"Date": None})


def steps() -> None:
    """Draw how far a word's row has moved by the end, by the step of its only gradient."""
    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for schedule, mark in (("constant", "o-"), ("linear", "s--")):
        how = LocalTraining("adamw", 5e-5, minibatch=1, weight_decay=0.01, schedule=schedule)  # type: ignore[arg-type]
        rates, one = how.rates(16), torch.full((1,), 1e-4, dtype=torch.double)
        axes.plot(
            range(1, 17), [float(moved(how, rates, {k: one}).abs()) / 5e-5 for k in range(16)], mark, label=schedule
        )
    axes.set(xlabel="step of the word's only gradient, of 16", ylabel="|change| / learning rate", ylim=(0, None))
    axes.legend(title="learning rate")
    figure.tight_layout()
    figure.savefig(DOCS / "real-updates-steps.svg", metadata={"Date": None})


if __name__ == "__main__":
    options(__doc__).parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "gradaudit"
    entries()
    steps()
