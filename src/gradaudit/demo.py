"""`gradaudit demo`: a real model's update, four settings, what leaks; in under a minute on two cores."""

from collections.abc import Sequence
from concurrent.futures import as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gradaudit.audit.batch import sent
from gradaudit.audit.fitting import INVERTERS, fitted
from gradaudit.audit.info import RECORDS, describe_client, run_info, write_info
from gradaudit.audit.prepare import prepare, private_batch
from gradaudit.audit.run import LEARNED, audited, open_folder
from gradaudit.bundles.bundle import save_bundle
from gradaudit.case import Case, parse_case
from gradaudit.files import only_writer, read_lines
from gradaudit.machine import worker_processes
from gradaudit.progress import step, track
from gradaudit.record import Record
from gradaudit.workspace import learned_in

OFF, PRACTICAL, TRAINER = "dropout off", "dropout on, embeddings frozen", "AdamW, dropout on"
ADAPTERS = "LoRA of rank 8, AdamW, dropout off"
SETTINGS: dict[str, dict[str, Any]] = {
    OFF: {"dropout": False},
    PRACTICAL: {"dropout": True, "freeze": ["embeddings"]},
    # one step of the transformers Trainer as it comes: its weight change, not its gradient, is sent
    TRAINER: {"dropout": True, "optimizer": "adamw", "learning_rate": 5e-5, "clip_norm": 1.0, "schedule": "linear"},
    # a later round's step: adapters begin with a B of zero, and then give nothing away
    ADAPTERS: {"dropout": False, "optimizer": "adamw", "learning_rate": 2e-4},
}
LORA = {ADAPTERS: {"rank": 8, "warmup": 4}}
"""Settings with adapters: left out where the extra `lora` is missing."""
# smaller budgets than the published ones, so that the demo ends in a minute
TAG = {"name": "tag", "steps": 150}
DAGER = {"name": "dager", "max_candidates": 30_000}
ATTACKS: dict[str, tuple[dict[str, Any], ...]] = {
    OFF: (TAG, DAGER),
    PRACTICAL: (DAGER, {"name": "decode"}),
    TRAINER: ({"name": "decode"},),
    ADAPTERS: ({"name": "decode"},),
}

SIGN: dict[str, Any] = {"name": "sign"}
# smaller budgets than the defaults, so that the demo ends in a minute
IG = {"name": "ig", "steps": 400, "restarts": 2}
LTI = {"name": "lti-images", "learner": "kernel", "mirrored": False, "refine": 150}
GIGIP = {"name": "gigip", "latent_steps": 150, "weight_steps": 300, "restarts": 2, "training_steps": 800}
IMAGE_SETTINGS: dict[str, tuple[list[dict[str, Any]], tuple[dict[str, Any], ...]]] = {
    "one image a step": ([], (IG, GIGIP, LTI)),
    "one image a step, signs alone": ([SIGN], (IG, GIGIP, LTI)),
}
IMAGE_COUNT = 4
"""Images read, each from an update of its own."""
JOBS = 2
"""Processes that share the cases, where there are so many threads: two threads on one case gain less."""


def cases() -> list[Case]:
    """Return the demo's cases: each setting with its attacks, on the first four sentences of the embedded sample."""
    return [
        parse_case(
            {"name": name, "client": client, "attack": attack, "data": {"batch_size": 4}}
            | ({"lora": LORA[name]} if name in LORA else {})
        )
        for name, client in SETTINGS.items()
        if name not in LORA or find_spec("peft")
        for attack in ATTACKS[name]
    ]


def image_cases() -> list[Case]:
    """Return the demo's cases: each setting with its attacks, on the first digits of a shuffled draw."""
    data = {"source": "digits", "shuffle_seed": 101, "batches": IMAGE_COUNT}
    fixed = {"model": "lenet", "task": "image-classification", "data": data}
    return [
        parse_case({"name": name, "defense": defenses, "attack": attack} | fixed)
        for name, (defenses, attacks) in IMAGE_SETTINGS.items()
        for attack in attacks
    ]


def run_demo(folder: Path, device: torch.device, vision: bool = False) -> list[Record]:
    """Run the demo's cases into a folder and return the records; what is finished in it is read, not run again.

    Args:
        folder: where report.html, records.jsonl, run.json and the private side go, and of text the update bundle of the
            practical setting.
        device: where the model runs.
        vision: digits in place of text.

    Raises:
        BadInputError: the model's package cannot be fetched, the extra `vision` is missing, or the folder cannot be
            written or is being written.
    """
    every = image_cases() if vision else cases()
    with only_writer(folder):
        first = prepare(every[0], Path.cwd(), device)
        open_folder(first, folder, shared=True)
        write_info(folder, run_info(first, {case.setting(): describe_client(case) for case in every}))
        done = list(read_lines(folder / RECORDS, Record))
        jobs = min(JOBS, torch.get_num_threads()) if device.type == "cpu" else 1
        if jobs > 1 and len(done) < len(every) * first.case.data.batches:
            with worker_processes(jobs) as pool:
                waiting = [pool.submit(_audited, case, folder, device, done) for case in every]
                for count, ready in enumerate(as_completed(waiting), 1):
                    ready.result()
                    step("demo", count, len(every))
                found = [work.result() for work in waiting]
        else:
            found = [_audited(case, folder, device, done) for case in track(every, "demo")]
        sent_on = next((case for case in every if case.setting() == PRACTICAL), None)
        if sent_on is not None:
            shown = prepare(sent_on, Path.cwd(), device, loaded=first.model)
            update, seen = sent(shown, private_batch(shown, 0), 0)
            save_bundle(folder / "update", shown.model, update, seen.knowledge)
    return [record for records in found for record in records]


def _audited(case: Case, folder: Path, device: torch.device, done: Sequence[Record]) -> list[Record]:
    """Return the records of one of the cases that share a folder, those that are done among them."""
    mine = {record.batch: record for record in done if record.case == case.content_hash()}
    batches = range(case.data.batches)
    if len(mine) < len(batches):
        ready = prepare(case, Path.cwd(), device)
        with learned_in(folder / LEARNED):
            if ready.attack.unfitted:
                ready = fitted(ready, folder / INVERTERS)
            for index in track(batches, "batches"):
                if index not in mine:
                    mine[index] = audited(ready, index, folder)
    return [mine[index] for index in batches]
