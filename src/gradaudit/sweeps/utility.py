"""What a defense costs: the model fine-tuned through the very client that is audited, and tested on rows left out."""

import copy
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from gradaudit.audit.prepare import client_of
from gradaudit.case import Case
from gradaudit.client.error_feedback import feedback_round
from gradaudit.client.mean_update import mean_update
from gradaudit.client.warm_up import warm_up_rows
from gradaudit.data.draw import draw_numbers
from gradaudit.data.rows import Rows, bind
from gradaudit.defenses.base import ExampleDefense, ModelDefense
from gradaudit.defenses.feedback import ErrorFeedback
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.files import replacing
from gradaudit.models.base import Model
from gradaudit.progress import track
from gradaudit.registry import describe, identity
from gradaudit.streams import stream

_AT_ONCE = 64
"""Rows a forward pass of the test."""
_RESAMPLES = 400
"""Of the test rows, for the interval."""


class UtilityTable(BaseModel):
    """[utility]: how the model is fine-tuned and tested."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(default=300, ge=1, description="rounds: the clients' mean update, applied by the server")
    batch_size: int = Field(
        default=16, ge=1, description="rows a round: of as many clients as hold it in batches of the attacked size"
    )
    learning_rate: float = Field(
        default=1e-4, gt=0, allow_inf_nan=False, description="of the server's AdamW; weight changes are added"
    )
    warmup: float = Field(
        default=0.1, ge=0, le=1, description="share of the rounds in which the learning rate rises to its value"
    )
    test_rows: int = Field(default=500, ge=2, description="rows that are tested on and never trained on")
    delta: float | None = Field(default=None, gt=0, lt=1, description="of epsilon; a tenth of one in the training rows")


@dataclass(frozen=True)
class Utility:
    """How good the model is after training with the defense.

    Args:
        accuracy: share of the test rows that are classed right, 0 to 100.
        f1: F1 of class 1 (two classes) or the mean of all classes', 0 to 100.
        mcc: Matthews correlation coefficient, -100 to 100.
        mcc_low, mcc_high: its 95% bootstrap interval over the test rows; of this one training, not of others.
        before: accuracy before any step, 0 to 100.
        train_rows, test_rows: how many.
        epsilon: that one training row has, by the smallest of the accountants; None where the defense has none.
        delta: at which.
        clients: how many update a round.
        seconds: of the training.
    """

    accuracy: float
    f1: float
    mcc: float
    mcc_low: float
    mcc_high: float
    before: float
    train_rows: int
    test_rows: int
    epsilon: float | None
    delta: float
    clients: int
    seconds: float


def kept_utility(folder: Path, case: Case, how: UtilityTable, model: Model, rows: Rows) -> Utility:
    """Return the utility of a case's client, from the folder where it was measured before.

    Args:
        folder: holds a file a measurement, named by the hash of all that decides it.
        case: whose model, client and defenses.
        how: the training.
        model: the case's model; it is left as it is.
        rows: the case's data.

    Raises:
        BadInputError: too few rows, the folder cannot be written, or the extra `utility` is missing.
        NotSupportedError: next-word training; examples drawn by chance together with what acts on whole updates.
    """
    path = folder / f"{_identity(case, how, model, rows)}.json"
    clients = _clients(case, how)
    if path.is_file():
        try:
            return replace(Utility(**json.loads(path.read_text(encoding="utf8"))), clients=clients)
        except (ValueError, TypeError, RecursionError):
            pass  # cut short by a kill: measured again
    found = utility(case, how, model, rows)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            draft.write_text(json.dumps(asdict(found)), encoding="utf8")
    except OSError as error:
        raise BadInputError(f"cannot write {path} ({error.strerror}); choose another --out") from None
    return found


def utility(case: Case, how: UtilityTable, model: Model, rows: Rows) -> Utility:
    """Fine-tune a copy of the model with the case's client and defenses, and test it; see `kept_utility`.

    A round has as many clients as hold `batch_size` rows in batches of the attacked size, so that what is trained
    with and what is attacked are updates of one kind: noise of each client acts on its own few rows.
    """
    if case.task == "causal-lm":
        raise NotSupportedError("utility is measured on classification; leave [utility] away for next words")
    tuned = copy.deepcopy(model)
    labeled = bind(tuned, rows.source)
    train, test = _split(case, how, labeled, _seen_before(case, rows))
    size = case.data.batch_size
    several = _clients(case, how)
    defenses = case.build_defenses()
    guard = next((d for d in defenses if isinstance(d, ExampleDefense)), None)
    rest = len(defenses) > 1
    sampled = guard is not None and guard.sampled
    if sampled and (rest or case.client.clients > 1 or case.client.optimizer != "none"):
        raise NotSupportedError(
            "utility of examples drawn by chance is measured for one gradient and no other defense; poisson = false"
        )
    if len(train) < several * size:
        raise BadInputError(
            f"{rows.where}: {len(train)} rows are left to train on, fewer than a round's {several * size}; lower "
            "test_rows or batch_size in [utility]"
        )
    began = time.perf_counter()
    before = _scores(labeled, test, model.spec.labels)["accuracy"]
    client = client_of(case, tuned)
    if sampled and guard is not None:
        # noise of several clients, each with its own draw, has the law of one client's: then draws need no equal parts
        client = replace(client, defenses=(guard.of_several(several),), clients=1)
    feeding = any(isinstance(d, ErrorFeedback) for d in defenses)
    held: dict[str, Tensor] | None = None  # the same clients send in every round, as many as a round has
    parameters = tuned.parameters()
    server = torch.optim.AdamW(parameters.values(), lr=how.learning_rate, weight_decay=0.0, fused=True)
    for step, chosen in enumerate(track(list(_draws(case, how, train, several * size, sampled)), "training")):
        rng = stream(case.seed, "utility", step)
        batch = labeled.batch(chosen) if chosen else None
        if batch is None:
            update = client.silent(rng, several * size)
        elif sampled:
            update = client.update(batch, rng, expected=float(several * size))
        elif feeding:
            update, held = feedback_round(client, batch, several, held, rng)
        else:
            update = mean_update(client, batch, several, rng)
        with torch.no_grad():
            for name, p in parameters.items():
                change = update.tensors.get(name)
                if update.kind == "delta" and change is not None:
                    p.add_(change)
                p.grad = change if update.kind == "gradient" else None
        rising = 1.0 if not how.warmup else min(1.0, (step + 1) / (how.warmup * how.steps))
        for group in server.param_groups:
            group["lr"] = how.learning_rate * rising
        server.step()
        tuned.weights_changed()
    delta = how.delta or 0.1 / len(train)
    return Utility(
        **_scores(labeled, test, model.spec.labels),
        before=before,
        train_rows=len(train),
        test_rows=len(test),
        epsilon=_epsilon(case, how, several * size, len(train), delta),
        delta=delta,
        clients=several,
        seconds=time.perf_counter() - began,
    )


def _clients(case: Case, how: UtilityTable) -> int:
    return max(1, -(-how.batch_size // case.data.batch_size))


def _seen_before(case: Case, rows: Rows) -> frozenset[int]:
    """Return the rows that adapters were warmed up on: the model knows them, and no defense guarded them."""
    if case.lora is None or not case.lora.warmup:
        return frozenset()
    steps = warm_up_rows(case.seed, len(rows), draw_numbers(case.data, len(rows), rows.where), case.lora.warmup)
    return frozenset(row for step in steps for row in step)


def _split(case: Case, how: UtilityTable, rows: Rows, without: frozenset[int]) -> tuple[list[int], list[int]]:
    """Return the rows to train and to test on; what shares its text with a tested row, or a part of it, is left out.

    Args:
        case, how, rows: as in `utility`.
        without: rows that are left out of both, and whatever shares its text with them.
    """
    order = torch.randperm(len(rows), generator=stream(case.seed, "utility split")).tolist()
    order = [row for row in order if rows.can_train(row) and row not in without]
    if without:
        order = rows.disjoint(order, sorted(without))
    test = order[: how.test_rows]
    return rows.disjoint(order[how.test_rows :], test), test


def _draws(case: Case, how: UtilityTable, train: list[int], size: int, sampled: bool) -> Iterator[list[int]]:
    rng = stream(case.seed, "utility rows")
    if sampled:
        for _ in range(how.steps):
            yield [train[i] for i in (torch.rand(len(train), generator=rng) < size / len(train)).nonzero()]
        return
    left: list[int] = []
    for _ in range(how.steps):
        if len(left) < size:
            left = [train[i] for i in torch.randperm(len(train), generator=rng)]
        yield left[:size]
        left = left[size:]


def _epsilon(case: Case, how: UtilityTable, size: int, rows: int, delta: float) -> float | None:
    """Return epsilon of a training row against a server that sees each client's update by itself."""
    guard = next((d for d in case.build_defenses() if isinstance(d, ExampleDefense)), None)
    said: dict[str, Any] = describe(guard) if guard is not None else {}
    if said.get("name") != "dp-sgd" or said["noise_multiplier"] == 0 or case.client.optimizer != "none":
        return None
    from gradaudit.accounting.check import check
    from gradaudit.accounting.claim import DPSGDClaim

    claim = DPSGDClaim(
        name="utility",
        mechanism="dp-sgd",
        noise_multiplier=said["noise_multiplier"],
        batch_size=size,
        examples=rows,
        steps=how.steps,
        sampling="poisson" if said["poisson"] else "shuffled",
        delta=delta,
    )
    return next(line.all_rounds for line in check(claim).supported if line.unit == "example")


def _scores(rows: Rows, test: list[int], labels: int) -> dict[str, float]:
    try:
        from torchmetrics.functional import accuracy, f1_score, matthews_corrcoef
    except ImportError:
        raise BadInputError("utility needs torchmetrics: pip install 'gradaudit[utility]'") from None
    parts = [rows.said(test[at : at + _AT_ONCE]) for at in range(0, len(test), _AT_ONCE)]
    found, truth = (torch.cat(side) for side in zip(*parts, strict=True))
    classes: Any = {"task": "multiclass", "num_classes": labels}
    both: Any = {"task": "binary"} if labels == 2 else classes | {"average": "macro"}
    kind: Any = {"task": "binary"} if labels == 2 else classes

    def mcc(some: Tensor) -> float:
        # of one class alone, said or true, the coefficient is 0 / 0: by convention 0; torchmetrics 1.9 says up to 32
        told = all(bool((one[some] != one[some[0]]).any()) for one in (found, truth))
        return 100 * float(matthews_corrcoef(found[some], truth[some], **kind)) if told else 0.0

    draw = stream(0, "bootstrap of test rows")
    again = [mcc(torch.randint(len(test), (len(test),), generator=draw)) for _ in range(_RESAMPLES)]
    low, high = torch.tensor(again).quantile(torch.tensor([0.025, 0.975])).tolist()
    return {
        "accuracy": 100 * float(accuracy(found, truth, **classes)),
        "f1": 100 * float(f1_score(found, truth, **both)),
        "mcc": mcc(torch.arange(len(test))),
        "mcc_low": low,
        "mcc_high": high,
    }


def _identity(case: Case, how: UtilityTable, model: Model, rows: Rows) -> str:
    size = case.data.batch_size
    # where nothing acts on an update, the mean of a round does not depend on who has which of its sentences
    alike = case.client.optimizer == "none" and all(isinstance(d, ModelDefense) for d in case.build_defenses())
    data = {
        "model": model.fingerprint(),
        "rows": rows.sha256,
        "columns": [case.data.text, case.data.label],
        "seed": case.seed,
        "task": [case.task, case.loss],
        "round": size * _clients(case, how),
        "attacked size": None if alike else size,
        "client": case.client.model_dump(mode="json") | ({"clients": 1} if alike else {}),
        "defense": [json.loads(json.dumps(identity(d, False))) for d in case.build_defenses()],
        "utility": how.model_dump(mode="json"),
    }
    if case.lora is not None:
        data["lora"] = case.lora.model_dump(mode="json")
        if case.lora.warmup:
            data["warm-up rows"] = "neither trained nor tested on"  # they were, once
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
