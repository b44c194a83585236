"""How a run is judged, from best to worst known, and the blind guess that it is held against."""

from __future__ import annotations

from typing import Literal

Level = Literal["leaks", "partly", "not shown", "inconclusive"]


BLIND = "blind"
"""The attack that never looks at the update: the baseline, which drives no verdict."""
