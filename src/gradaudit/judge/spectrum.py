"""The spectrum of a block's gradient, for records and reports."""

import torch

from gradaudit.leakage.rowspace.subspace import gap_rank, stack
from gradaudit.record import Spectrum
from gradaudit.types import Observation


def spectrum(seen: Observation, tokens: int | None) -> Spectrum | None:
    """Return the spectrum of the first block of which q, k or v were seen, None when there is none.

    Args:
        seen: the observation.
        tokens: b, when it is known.
    """
    for layer in range(seen.model.depth):
        stacked, roles = stack(seen, layer)
        if stacked is None:
            continue
        values = torch.linalg.svdvals(stacked)
        rank, confidence = gap_rank(values, torch.finfo(next(iter(seen.tensors.values())).dtype).eps)
        relative = (values / values[0]).tolist()
        return Spectrum(
            layer=layer,
            roles="".join(roles),
            values=tuple(float(f"{v:.3g}") for v in relative),
            rank=rank,
            tokens=tokens,
            width=seen.model.width,
            confidence=min(confidence, 1e12),
        )
    return None
