"""Beliefs about known rows through several steps: moments by quadrature, rows found among others, strays."""

import pytest
import torch

from gradaudit.leakage.adapters.stepped_words import times
from gradaudit.leakage.uneven.propagation import Propagation, tilted
from gradaudit.leakage.uneven.steps import AdamSteps

TWO = AdamSteps([0.5, 0.5], 1.0)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("step", "base"),
    [(AdamSteps([1.0], 1.0), torch.ones(1, 1)), (TWO, torch.eye(2)), (TWO, torch.tensor([[1.0, 1.0], [-1.0, 1.0]]))],
    ids=["one step", "two steps", "mean and slope"],
)
def test_what_an_entry_says_is_its_posterior(step, base):
    """Against importance sampling of what is known before, by a million draws; strays are a flat likelihood."""
    base, draw = base.double(), rng()
    mean = 0.5 * torch.randn(3, len(base), dtype=torch.double, generator=draw)
    root = torch.randn(3, len(base), len(base), dtype=torch.double, generator=draw)
    about = root @ root.mT + 0.3 * torch.eye(len(base))
    sent, error = torch.tensor([0.2, -0.7, 0.95]).double(), torch.tensor([0.1, 0.2, 0.3]).double()
    found, spread, left = tilted(step, base, mean, about, sent, error)
    for n in range(3):
        drawn = torch.randn(1_000_000, len(base), dtype=torch.double, generator=draw)
        z = mean[n] + drawn @ torch.linalg.cholesky(about[n]).mT
        off = sent[n] - step.sent(torch.einsum("pk,np->kn", base, z))
        fits = (-off.square() / (2 * error[n] ** 2)).exp() / error[n]
        weight = (fits + 0.05) / (fits + 0.05).sum()
        middle = weight @ z
        second = torch.einsum("n,np,nq->pq", weight, z - middle, z - middle)
        size = about[n].diagonal().sqrt()
        torch.testing.assert_close(found[n] / size, middle / size, rtol=0, atol=0.03)
        torch.testing.assert_close(spread[n] / size[:, None] / size, second / size[:, None] / size, rtol=0.1, atol=0.03)
        fair = weight * fits / (fits + 0.05)
        least = (fair * off.square()).sum() / fair.sum()
        assert 0.9 * least < left[n] < 3 * least, "a point stands for its cell, and leaves what that does"


def made(seed: int, tied: bool = True, strays: float = 0.0):
    """Six of forty rows, two steps, eight lines of very different sizes."""
    draw = rng(seed)
    rows = torch.randn(40, 160, dtype=torch.double, generator=draw)
    sizes = 10 ** (1 + 2 * torch.rand(8, 1, dtype=torch.double, generator=draw))
    first = torch.randn(8, 6, dtype=torch.double, generator=draw) * sizes
    change = 0.1 * torch.randn(8, 6, dtype=torch.double, generator=draw) * sizes
    signals = torch.stack([first - change, first + change])
    if not tied:
        signals[0, :, 3:], signals[1, :, :3] = 0, 0
    sent = TWO.sent(torch.einsum("knr,rd->knd", signals, rows[:6]))
    stray = torch.rand(sent.shape, generator=draw) < strays
    sent = torch.where(stray, -sent, sent) + 1e-6 * torch.randn(sent.shape, dtype=torch.double, generator=draw)
    return rows, signals, sent


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("strays", [0.0, 0.02])
def test_rows_that_were_sent_are_told_from_others_and_their_signals_known(seed, strays):
    rows, signals, sent = made(seed, strays=strays)
    base = times(2, True, False, 2)
    belief = Propagation(sent, torch.full_like(sent, 1e-6), TWO, base, True, rows)
    for _ in range(30):
        belief.turn()
    strengths = belief.strengths()
    assert float(strengths[:6].min()) > 20 * float(strengths[6:].max())
    per_step = torch.einsum("pk,pnr->knr", base, belief.signals())[:, :, :6]
    # a gradient's size shows little, its direction well
    alike = torch.cosine_similarity(per_step.movedim(0, 1).flatten(1), signals.movedim(0, 1).flatten(1))
    assert float(alike.median()) > 0.999


def test_a_row_that_is_missing_explains_most_of_what_is_left():
    rows, _, sent = made(0)
    held = [0, 1, 2, 4, 5, *range(10, 30)]
    belief = Propagation(sent, torch.full_like(sent, 1e-6), TWO, times(2, True, False, 2), True, rows[held])
    for _ in range(8):
        belief.turn()
    gains = belief.gains(rows)
    gains[held] = 0
    assert int(gains.argmax()) == 3
    belief.exchange([0, 1, 2, 3, 4], rows[3:4])
    for _ in range(20):
        belief.turn()
    assert float(belief.strengths().min()) > 1000
    assert len(belief.rows) == 6


def test_what_was_let_go_comes_back():
    rows, _, sent = made(0)
    belief = Propagation(sent, torch.full_like(sent, 1e-6), TWO, times(2, True, False, 2), True, rows)
    for _ in range(30):
        belief.turn()
    sites, noise, strengths = belief.sites.clone(), belief.noise.clone(), belief.strengths()
    belief.loosen()
    assert float(belief.sites.norm()) < 0.2 * float(sites.norm())
    assert bool((belief.noise > 10 * noise).all())
    assert float(belief.strengths().max()) < float(strengths.max())
    for _ in range(30):
        belief.turn()
    assert set(belief.strengths().topk(6).indices.tolist()) == set(range(6))
    assert bool((belief.noise < 2 * noise).all())


def test_rows_of_one_step_alone_have_priors_of_their_own():
    rows, _, sent = made(1, tied=False)
    belief = Propagation(sent, torch.full_like(sent, 1e-6), TWO, times(2, False, False, 2), False, rows)
    for _ in range(40):
        belief.turn()
    assert set(belief.strengths().topk(6).indices.tolist()) == set(range(6))
    assert float((belief.widths[1, :3] / belief.widths[0, :3]).max()) < 0.1
    assert float((belief.widths[0, 3:6] / belief.widths[1, 3:6]).max()) < 0.1


def test_of_chance_no_row_stands_out():
    """Strengths of what nothing made are large, as the fit adapts to it; they are so of all rows, and decoys tell."""
    draw = rng(4)
    rows = torch.randn(40, 160, dtype=torch.double, generator=draw)
    sent = 0.9 * torch.randn(8, 160, dtype=torch.double, generator=draw).sign()
    belief = Propagation(sent, torch.full_like(sent, 1e-6), TWO, times(2, True, False, 2), True, rows)
    for _ in range(20):
        belief.turn()
    strengths = belief.strengths().sort().values
    assert float(strengths[-1]) < 2 * float(strengths[-5])
    assert float(belief.noise.min()) > 0.003
