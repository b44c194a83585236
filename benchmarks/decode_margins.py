"""Measure the margins that exact decoding rests on, with the truth at hand: ranks, residuals, missed rows.

    OMP_NUM_THREADS=1 python benchmarks/decode_margins.py cases/decode-minilm-sst2-b4.toml --batches 0 1 2 3 4

Prints for each batch: the worst rank of a right token among the prefiltered ones, by plain residual and after
screening; the largest residual of a right token's mask; the smallest residual of a wrong token's mask (of those that
keep at least half); and the rows of the batch that were not decoded, special tokens by name, others counted.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch

from gradaudit.attacks.decode import _LEAST_KEPT, Decode, _Decoder
from gradaudit.audit import pick_device, prepare, private_batch, sent
from gradaudit.case import load_case
from gradaudit.leakage.erasures import decode, outer_products, refine
from gradaudit.leakage.subspace import VocabularyCheck, span
from gradaudit.streams import stream


def main() -> None:
    """Measure the first batches of a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", type=Path)
    parser.add_argument("--batches", type=int, nargs="*", default=[0, 1, 2], help="which batches, by number")
    given = parser.parse_args()
    ready = prepare(load_case(given.case), given.case.resolve().parent, pick_device("cpu"))
    attack, model = Decode(), ready.model
    for number in given.batches:
        batch = private_batch(ready, number)
        _, seen = sent(ready, batch, number)
        truth = Counter((p, t) for row in batch.sequences() for p, t in enumerate(row))
        first = span(seen, 0)
        assert first is not None
        decoder = _Decoder(attack, seen, first, stream(ready.case.seed, "attack", number))
        check, products = VocabularyCheck(model.first_input_parts(), first), outer_products(first.basis)
        plain_rank = screened_rank = 0
        right, wrong = 0.0, 1.0
        for position in range(1, batch.ids.shape[1]):
            ids = check.rough(position).topk(attack.candidates, largest=False).indices
            rows = model.first_inputs(position, ids).double()
            fit = decode(first.basis, products, rows, start=None, first=0, steps=attack.screening)
            order = fit.share.argsort(descending=True).tolist()
            in_batch = [i for i, t in enumerate(ids.tolist()) if (position, t) in truth]
            plain_rank = max([plain_rank, *in_batch])
            screened_rank = max([screened_rank, *(order.index(i) for i in in_batch)])
            best = torch.tensor(order[: 2 * len(batch.ids) + 8])
            fit = decode(
                first.basis, products, rows[best], start=fit.weights[best], first=attack.screening, steps=attack.steps
            )
            kept, outside = refine(decoder.outside, rows[best], fit.kept)
            plausible = kept.double().mean(1) > _LEAST_KEPT
            hit = torch.tensor([(position, int(ids[i])) in truth for i in best.tolist()])
            right = max([right, *outside[plausible & hit].tolist()])
            wrong = min([wrong, *outside[plausible & ~hit].tolist()])
        decoder.tokens()
        decoder.copies()
        found = Counter((row.position, row.token) for row in decoder.found)
        named = {t: model.tokenizer.convert_ids_to_tokens(t) for t in model.special.ids}
        missed = Counter(named.get(t, "other") for (_, t), n in (truth - found).items() for _ in range(n))
        print(
            f"batch {number}: b = {batch.tokens}, worst rank of a right token {plain_rank} plain, {screened_rank} "
            f"screened; right rows at most {right:.1e}, wrong ones at least {wrong:.1e}; "
            f"missed {dict(missed) or 'none'}, false {sum((found - truth).values())}",
            flush=True,
        )


if __name__ == "__main__":
    main()
