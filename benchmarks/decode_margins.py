"""Measure the margins that exact decoding rests on, with the truth at hand: ranks, residuals, missed rows.

    OMP_NUM_THREADS=1 python benchmarks/decode_margins.py cases/decode-minilm-sst2-b4.toml --batches 0 1 2 3 4

Prints for each batch: the worst rank of a right token by plain residual; the largest residual of a right token's mask
among those decoded in one pass; the smallest residual of a wrong token's mask (of those that keep at least half); and
the rows that were not decoded in the end, special tokens by name, others counted.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from grid import options

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import pick_device, prepare, private_batch
from gradaudit.case import load_case
from gradaudit.leakage.decoding.dropout_masks import HALF, refine_masks, relaxed_masks
from gradaudit.leakage.decoding.rows import INSIDE, LEAST_KEPT, MaskedInputs, Search, find_rows
from gradaudit.leakage.rowspace.subspace import span
from gradaudit.machine import ready_process
from gradaudit.streams import stream

CANDIDATES = 200


def main() -> None:
    """Measure the first batches of a case."""
    parser = options(__doc__)
    parser.add_argument("case", type=Path)
    parser.add_argument("--batches", type=int, nargs="*", default=[0, 1, 2], help="which batches, by number")
    given = parser.parse_args()
    ready_process()
    ready = prepare(load_case(given.case), given.case.resolve().parent, pick_device("cpu"))
    model = ready.model
    for number in given.batches:
        batch = private_batch(ready, number)
        _, seen = sent(ready, batch, number)
        truth = Counter((p, t) for row in batch.sequences() for p, t in enumerate(row))
        first = span(seen, 0)
        assert first is not None
        inputs = MaskedInputs(model, first)
        worst, right, wrong = 0, 0.0, 1.0
        for position in range(1, batch.ids.shape[1]):
            ids = inputs.near(position, max(CANDIDATES, first.rank))
            clean = inputs.clean(position, ids)
            kept, outside = refine_masks(inputs.outside, clean, relaxed_masks(inputs.basis, clean) > HALF)
            hit = torch.tensor([(position, t) in truth for t in ids.tolist()])
            worst = max([worst, *torch.where(hit)[0].tolist()])
            plausible = kept.double().mean(1) > LEAST_KEPT
            right = max([right, *outside[hit & (outside < INSIDE)].tolist()])
            wrong = min([wrong, *outside[plausible & ~hit].tolist()])
        how = Search(len(batch.ids), CANDIDATES, model.max_length)
        found = Counter((row.position, row.token) for row in find_rows(inputs, how, stream(0, "margins", number)))
        named = {t: model.tokenizer.convert_ids_to_tokens(t) for t in model.special.ids}
        missed = Counter(named.get(t, "other") for (_, t), n in (truth - found).items() for _ in range(n))
        print(
            f"batch {number}: b = {batch.tokens}, worst rank of a right token {worst}; right rows at most {right:.1e}, "
            f"wrong ones at least {wrong:.1e}; missed {dict(missed) or 'none'}, false {sum((found - truth).values())}",
            flush=True,
        )


if __name__ == "__main__":
    main()
