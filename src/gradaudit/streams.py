"""Random streams: one a stage, all derived from one seed, the same on every device."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def stream(seed: int, *stage: str | int) -> torch.Generator:
    """Return the CPU generator of one stage of one run.

    Streams of different stages are independent, so adding a stage never moves another's numbers. The generator
    lives on the CPU whatever the device: draw there and move, and a GPU gives the same answer.

    Args:
        seed: the case's seed.
        stage: names that tell the stage apart, for example ("client", 3, "dropout").
    """
    digest = hashlib.sha256(repr((seed, *stage)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def draw_seed(rng: torch.Generator) -> int:
    """Return one integer drawn from `rng`, to seed something that takes only integers."""
    return int(torch.randint(2**31 - 1, (1,), generator=rng))


@contextmanager
def global_stream(rng: torch.Generator, device: torch.device) -> Iterator[None]:
    """Run a block with torch's global generators seeded from `rng`, and restore them after.

    Only for library code that takes no generator (dropout inside a transformers model, weight initialization).
    """
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(draw_seed(rng))
        yield
