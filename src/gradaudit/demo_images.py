"""`gradaudit demo --vision`: digits read out of the updates of a small network, plain and defended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gradaudit.audit import (
    LEARNED,
    audited,
    describe_client,
    fitted_case,
    open_folder,
    prepare,
    run_info,
    write_info,
)
from gradaudit.case import Case, parse_case
from gradaudit.fitting import INVERTERS
from gradaudit.learned.kept import learned_in
from gradaudit.one_writer import only_writer
from gradaudit.progress import step
from gradaudit.record import Record

SIGN: dict[str, Any] = {"name": "sign"}
# smaller budgets than the defaults, so that the demo ends in a minute
IG = {"name": "ig", "steps": 400, "restarts": 2}
LTI = {"name": "lti-images", "learner": "kernel", "mirrored": False, "refine": 150}
GIGIP = {"name": "gigip", "latent_steps": 150, "weight_steps": 300, "restarts": 2, "training_steps": 800}
SETTINGS: dict[str, tuple[list[dict[str, Any]], tuple[dict[str, Any], ...]]] = {
    "one image a step": ([], (IG, GIGIP, LTI)),
    "one image a step, signs alone": ([SIGN], (IG, GIGIP, LTI)),
}
IMAGES = 4
"""Images read, each from an update of its own."""


def image_cases() -> list[Case]:
    """Return the demo's cases: each setting with its attacks, on the first digits of a shuffled draw."""
    data = {"source": "digits", "shuffle_seed": 101, "batches": IMAGES}
    fixed = {"model": "lenet", "task": "image-classification", "data": data}
    return [
        parse_case({"name": name, "defense": defenses, "attack": attack} | fixed)
        for name, (defenses, attacks) in SETTINGS.items()
        for attack in attacks
    ]


def run_image_demo(folder: Path, device: torch.device) -> list[Record]:
    """Run the demo's cases into a folder and return the records; a finished demo in it is read, not run again.

    Args:
        folder: where report.html, records.jsonl, images.jsonl and run.json go.
        device: where the model runs.

    Raises:
        BadInputError: the extra `vision` is missing, or the folder cannot be written or is being written.
    """
    records: list[Record] = []
    every = image_cases()
    with only_writer(folder), learned_in(folder / LEARNED):
        for number, case in enumerate(every):
            ready = prepare(case, Path.cwd(), device)
            done = open_folder(ready, folder, shared=True)
            if ready.attack.unfitted and len(done) < IMAGES:
                ready = fitted_case(ready, folder / INVERTERS)
            if number == 0:
                write_info(folder, run_info(ready, {c.setting(): describe_client(c) for c in every}))
            for index in range(IMAGES):
                step("demo", number * IMAGES + index, len(every) * IMAGES)
                records.append(done[index] if index in done else audited(ready, index, folder))
        step("demo", len(every) * IMAGES, len(every) * IMAGES)
    return records
