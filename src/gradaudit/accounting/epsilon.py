"""Epsilon of noise: Gaussian exactly, Laplace by RDP, sampled Gaussian by four accountants side by side."""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gradaudit.errors import BadInputError

NUMERIC_TO = 50.0
"""Largest epsilon by RDP at which the numeric accountants are asked: above, their grids fill the memory."""

LEAST = 1e-15
"""Noise over sensitivity below which there is none: its epsilon, above 1e29, is no number to print."""
MOST_STEPS = 1_000_000
"""Steps to which the numeric accountants are asked."""

FINE, GRID = 0.01, 1e-4
"""Error in epsilon that Opacus' PRV accountant allows, and dp-accounting's step of its grid: their defaults at epsilon
1, as many times that where RDP says more. Their time and memory grow with epsilon over these: 134,000 steps at epsilon
22 took 7 s and 1.2 GB with the defaults, the epsilon of a single step at 45 took 11 s; now 0.3 and 0.2 s. What is said
is an upper bound all the same, up to 1% larger; by PLD up to 7% at a million steps."""

EXACT = "dp-accounting, exact"


def gaussian_epsilon(noise: float, sensitivity: float, delta: float, rounds: int = 1) -> float:
    """Return the smallest epsilon of a Gaussian mechanism repeated over rounds, exactly.

    Rounds of one sensitivity compose to a single Gaussian mechanism whose noise is smaller by their square root (Dong,
    Roth and Su, "Gaussian differential privacy", corollary 3.3), whose epsilon has a closed form (Balle and Wang,
    "Improving the Gaussian mechanism", theorem 8). The classical sqrt(2 ln(1.25 / delta)) holds below epsilon 1 only.

    Args:
        noise: standard deviation of the noise.
        sensitivity: L2 norm of the largest change of what the noise is added to, in the same unit.
        delta: failure probability.
        rounds: how often the mechanism runs on the same data.

    Raises:
        BadInputError: the extra `dp` is not installed.
    """
    if sensitivity == 0:
        return 0.0
    ratio = noise / (sensitivity * math.sqrt(rounds))
    if ratio < LEAST:
        return math.inf
    with _quiet():
        return float(_dp_accounting().get_epsilon_gaussian(ratio, delta))


def laplace_epsilon(ratio: float, values: int, delta: float) -> float:
    """Return an epsilon of Laplace noise on so many values: the smaller of the sum and of RDP (dp-accounting).

    Args:
        ratio: scale of the noise over the largest change of a value.
        values: how many are released, over all rounds.
        delta: failure probability.

    Raises:
        BadInputError: the extra `dp` is not installed.
    """
    pure = values / ratio
    google = _dp_accounting()
    with _quiet():
        by_orders = google.rdp.RdpAccountant().compose(google.LaplaceDpEvent(ratio), values).get_epsilon(delta)
    return max(0.0, min(pure, float(by_orders)))


def sampled_epsilons(noise_multiplier: float, rate: float, steps: int, delta: float) -> dict[str, float | None]:
    """Return epsilon of DP-SGD with Poisson sampling, one example added or removed, by each accountant.

    Args:
        noise_multiplier: standard deviation of the noise over the clipping bound.
        rate: probability with which an example enters a step's batch.
        steps: number of steps.
        delta: failure probability.

    Returns:
        epsilon by the accountant's name; None where a numeric accountant was not asked (epsilon above `NUMERIC_TO`).
        All are upper bounds: the smallest holds.

    Raises:
        BadInputError: the extra `dp` is not installed.
    """
    google = _dp_accounting()
    if noise_multiplier < LEAST:
        return {"dp-accounting, RDP": math.inf}
    event = google.GaussianDpEvent(noise_multiplier)
    event = google.PoissonSampledDpEvent(rate, event) if rate < 1 else event

    def of_google(accountant: Any) -> float:
        return float(accountant.compose(event, steps).get_epsilon(delta))

    with _quiet():
        from opacus.accountants import PRVAccountant, RDPAccountant

        def of_opacus(accountant: Any, **how: float) -> float:
            accountant.history = [(noise_multiplier, rate, steps)]
            return float(accountant.get_epsilon(delta, **how))

        found: dict[str, float | None] = {
            "Opacus, RDP": of_opacus(RDPAccountant()),
            "dp-accounting, RDP": of_google(google.rdp.RdpAccountant()),
        }
        least = min(e for e in found.values() if e is not None)
        times = max(1.0, least)
        numeric: dict[str, Callable[[], float]] = {
            "Opacus, PRV": lambda: of_opacus(PRVAccountant(), eps_error=FINE * times),
            "dp-accounting, PLD": lambda: of_google(
                google.pld.PLDAccountant(value_discretization_interval=GRID * times)
            ),
        }
        small = least <= NUMERIC_TO and steps <= MOST_STEPS
        found |= {name: _tried(ask) if small else None for name, ask in numeric.items()}
        found = {name: None if e is None else max(0.0, e) for name, e in found.items()}
    if rate >= 1:
        found[EXACT] = gaussian_epsilon(noise_multiplier, 1.0, delta, steps)
    return found


def _tried(ask: Callable[[], float]) -> float | None:
    try:
        found = ask()
    except (ValueError, RuntimeError, ArithmeticError):  # its grid is too coarse for this delta, and it says so
        return None
    return found if math.isfinite(found) else None


def _dp_accounting() -> Any:
    try:
        import dp_accounting
        import opacus.accountants  # noqa: F401 - both are the extra's, and half of it is an answer for nobody
    except ImportError as missing:
        raise BadInputError(
            f"accounting needs '{missing.name}', which is not installed: pip install 'gradaudit[dp]'"
        ) from None
    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the accountants' remarks on their own orders and grids away from the user's screen."""
    loggers = [logging.getLogger(name) for name in ("absl", "opacus")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
