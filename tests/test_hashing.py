"""Feature hashing: one bin a coordinate, by integers alone."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from gradaudit.learned.text.hashing import Hash

SIZES = {"a": 300, "b": 41, "c": 1659}
MASK = (1 << 64) - 1


def splitmix(seed: int, index: int) -> int:
    """Return the hash of one index by Python's own integers (Steele et al., 2014)."""
    z = (seed + 0x9E3779B97F4A7C15 * (index + 1)) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def matrix(hash_: Hash) -> torch.Tensor:
    """Return the hash as an explicit [bins, size] matrix."""
    out = torch.zeros(hash_.bins, sum(hash_.sizes.values()), dtype=torch.float64)
    for index in range(sum(hash_.sizes.values())):
        found = splitmix(hash_.seed, index)
        place = ((found >> 33) & 0x7FFFFFFF) * hash_.bins >> 31
        out[place, index] = 1.0 - 2.0 * (found & 1) if hash_.signed else 1.0
    return out


def updates(count: int = 5) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {name: torch.randn(count, size, generator=rng) for name, size in SIZES.items()}


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("seed", [0, 7, 2**62 - 1])
def test_it_is_the_product_with_the_matrix(seed, signed):
    hash_, made = Hash(SIZES, 200, seed, signed), updates()
    expected = torch.cat(list(made.values()), 1).double() @ matrix(hash_).T
    found = hash_(reversed(list(made.items())), 5)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, atol=1e-5)


def test_any_cut_gives_the_same_bits():
    hash_, made = Hash(SIZES, 200, 3), updates()
    whole = hash_(made.items(), 5)
    for step in (1, 7, 64):
        out = torch.zeros(5, 200)
        for name, values in made.items():
            for first in range(0, values.shape[1], step):
                hash_.add(out, name, values[:, first : first + step], first)
        assert torch.equal(out, whole)
    alone = torch.cat([hash_([(n, v[i : i + 1]) for n, v in made.items()], 1) for i in range(5)])
    assert torch.equal(alone, whole)


def test_bins_are_balanced_and_seeds_differ():
    size, bins = 200_000, 500
    hash_ = Hash({"x": size}, bins, 11, signed=True)
    counts = hash_.counts(["x"])[0]
    assert counts.sum() == size
    # binomial counts: the chi-square statistic has bins - 1 degrees of freedom
    assert 1e-4 < stats.chisquare(counts.numpy()).pvalue < 1 - 1e-4
    # neighbors are independent: pairs of bins of consecutive coordinates, folded to a table of 10 x 10
    tens = hash_.places(0, size) * 10 // bins
    pairs = torch.bincount(tens[:-1] * 10 + tens[1:], minlength=100)
    assert stats.chisquare(pairs.numpy()).pvalue > 1e-4
    assert abs(float(hash_.signs(0, size).mean())) < 4 / size**0.5
    other = Hash({"x": size}, bins, 12).places(0, size)
    assert abs(float((other == hash_.places(0, size)).float().mean()) - 1 / bins) < 4 * (1 / bins / size) ** 0.5
    assert torch.equal(hash_.places(100, 200), hash_.places(0, size)[100:200])
