"""Why DAGER's search loses sentences of encoder batches: what its sets hold, with the truth at hand.

    OMP_NUM_THREADS=1 python benchmarks/encoder_sets.py

For each sentence of the batches of `dager.py encoders`: whether all of its words are among the nearest B of their
positions, and how many products its length has at least, once all shorter sentences were found and their words are
gone. Nothing is attacked. Writes benchmarks/results/dager/encoder-sets.md.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import torch
from dager import PLAIN, setting
from grid import made, options, write_table

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.leakage.rowspace.growth import AcceptedTokens
from gradaudit.leakage.rowspace.subspace import span
from gradaudit.machine import ready_process
from gradaudit.models.transformers import TransformersModel

MOST = 10_000_000
"""Products a length in the paper."""


def least_products(sentence: list[int], left: list[list[int]]) -> int:
    """Return how many sentences can be made of the words that those not yet found have at each position."""
    return math.prod(len({other[p] for other in left if len(other) > p}) for p in range(1, len(sentence) - 1))


def main() -> None:
    """Count, and write the table."""
    options(__doc__).parse_args()
    ready_process()
    lines, model = [], None
    for data in ("cola", "sst2", "rt"):
        for size in (2, 4):
            case = parse_case(setting("", "minilm", data, size, 5, attack=PLAIN).case())
            ready = prepare(case, Path.cwd(), torch.device("cpu"), model)
            model = ready.model
            assert isinstance(model, TransformersModel)
            found: Counter[str] = Counter()
            for number in range(5):
                batch = private_batch(ready, number)
                seen = sent(ready, batch, number)[1]
                first = span(seen, 0, ("q", "k", "v"), fixed_rank=False, noise=True)
                assert first is not None
                accepted = AcceptedTokens(model, first, None)
                truth = sorted(batch.sequences(), key=len)
                sets = [[truth[0][0]], *(accepted.at(p).tolist() for p in range(1, max(len(s) for s in truth)))]
                for n, sentence in enumerate(truth):
                    found["sentences"] += 1
                    cut = any(t not in sets[p][:size] for p, t in enumerate(sentence[:-1]))
                    many = least_products(sentence, truth[n:]) > MOST
                    found["cut"] += cut
                    found["many"] += many and not cut
                    found["linked"] += any(len(sets[p]) > size for p in range(len(sentence)))
                    assert all(t in sets[p] for p, t in enumerate(sentence)), "block 0 lost a word"
            lines.append(
                f"| {data} | {size} | {found['sentences']} | {found['linked']} | {found['cut']} | {found['many']} "
                f"| {100 * (1 - (found['cut'] + found['many']) / found['sentences']):.0f} |"
            )
            print(lines[-1], flush=True)
    head = f"{made()} MiniLM, draw 202, the batches of encoders.md; with the truth at hand, nothing is attacked."
    columns = (
        "| data | B | sentences | some position accepts more words than B | a word is not among the nearest B "
        "| all are, but more than 10 million products | all products tried, at most, % |\n" + "|---" * 7 + "|"
    )
    write_table(Path("benchmarks/results/dager/encoder-sets.md"), head, "\n".join([columns, *lines]))


if __name__ == "__main__":
    main()
