"""Random streams: the same for the same stage, independent for others, and no trace in torch's own."""

from __future__ import annotations

import math

import pytest
import torch

from gradaudit.streams import draw_seed, global_stream, stream

CPU = torch.device("cpu")


def draw(seed: int, *stage: str | int, n: int = 4000) -> torch.Tensor:
    return torch.randn(n, generator=stream(seed, *stage))


def test_same_stage_same_numbers():
    assert torch.equal(draw(3, "client", 1), draw(3, "client", 1))
    first = stream(3, "client", 1)
    torch.randn(5, generator=first)
    assert torch.equal(draw(3, "client", 1), draw(3, "client", 1)), "a used generator leaves the next one fresh"


def test_streams_are_pinned_for_ever():
    """A record names its seed: the numbers behind it may never change."""
    found = [stream(0, "client", 0).initial_seed(), stream(7, "attack", 2).initial_seed()]
    assert found == [4911380567041755763, 8498009804587141760]


@pytest.mark.parametrize(
    ("one", "other"),
    [((0, "a"), (1, "a")), ((0, "a"), (0, "b")), ((0, "a", 1), (0, "a", 11)), ((0, "a", 1), (0, "a", "1")),
     ((0, "ab"), (0, "a", "b")), ((0,), (0, 0)), ((1, "client", 0), (0, "client", 1))],
)  # fmt: skip
def test_other_stages_are_uncorrelated(one, other):
    a, b = draw(*one), draw(*other)
    correlation = float((a * b).mean())
    assert abs(correlation) < 5 / math.sqrt(len(a))


def test_drawn_seeds_move_with_the_generator():
    rng = stream(0, "x")
    seeds = [draw_seed(rng) for _ in range(50)]
    assert len(set(seeds)) == 50
    assert seeds[0] == draw_seed(stream(0, "x"))
    assert all(0 <= s < 2**31 - 1 for s in seeds)


def test_global_stream_is_seeded_and_leaves_no_trace():
    before = torch.random.get_rng_state()
    found = []
    for _ in range(2):
        with global_stream(stream(0, "x"), CPU):
            found.append(torch.rand(8))
    assert torch.equal(*found)
    with global_stream(stream(1, "x"), CPU):
        assert not torch.equal(found[0], torch.rand(8))
    with pytest.raises(ZeroDivisionError), global_stream(stream(0, "x"), CPU):
        torch.rand(8)
        1 / 0  # noqa: B018
    assert torch.equal(before, torch.random.get_rng_state())
