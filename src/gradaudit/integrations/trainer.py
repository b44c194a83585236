"""A callback of transformers' Trainer that records steps or rounds of a training as bundles."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback

from gradaudit.bundles.capture import Capture, capture
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.files import replacing_folder
from gradaudit.integrations.recording import swallowing
from gradaudit.types import LocalTraining, Precision

_OPTIMIZERS: dict[str, Literal["adamw", "sgd"]] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "sgd": "sgd",
}
"""Those of TrainingArguments that an attacker can be told of."""


class AuditCallback(TrainerCallback):  # type: ignore[misc]
    """Record steps of a training as bundles that `gradaudit attack` reads; a training never breaks by it.

    What goes wrong is logged (logger "gradaudit") and swallowed. Only a training in one process on one device is
    recorded.

    Args:
        folder: the bundles go into folders of it: "step-1" and so on, or "round-1".
        every: "gradient": the first step and every so many behind it are recorded; "delta": steps of a round, whose
            weight change is one update. The last round ends with the training.
        what: "gradient" (FedSGD) or "delta" (FedAvg).
        tokenizer: the model's; the Trainer's `processing_class` when None.
        most: bundles at most; each takes the room of the model and its update.

    Raises:
        BadInputError: a number below 1, or another kind of update.
    """

    def __init__(
        self,
        folder: str | Path,
        every: int = 100,
        what: Literal["gradient", "delta"] = "gradient",
        *,
        tokenizer: Any = None,
        most: int = 10,
    ) -> None:
        if every < 1 or most < 1:
            raise BadInputError(f"AuditCallback takes every and most of at least 1, got {every} and {most}")
        if what not in ("gradient", "delta"):
            raise BadInputError(f"AuditCallback takes what = 'gradient' or 'delta', got '{what}'")
        self._folder, self._every, self._what = Path(folder), every, what
        self._tokenizer, self._most, self._made = tokenizer, most, 0
        self._open = ExitStack()
        self._seen: Capture | None = None
        self._first = 0
        self._rates: list[float] = []
        self._refused = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say so where a training cannot be recorded."""
        with swallowing("the training"):
            self._refused = False
            if args.world_size > 1 or args.n_gpu > 1:
                self._refused = True
                raise NotSupportedError(
                    f"AuditCallback takes a training in one process on one device, and this one has "
                    f"{max(args.world_size, args.n_gpu)}: each holds its own part of the batch alone"
                )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to record where a step or a round is due."""
        due = state.global_step % self._every == 0 and self._made < self._most
        if self._seen is None and due and not self._refused:
            with swallowing(f"step {state.global_step + 1}"), ExitStack() as stack:
                words = self._tokenizer if self._tokenizer is not None else kwargs.get("processing_class")
                self._first, self._rates = state.global_step, []
                draft = stack.enter_context(replacing_folder(self._folder / self._name()))
                loss = LocalTraining(precision=_precision(args), label_smoothing=args.label_smoothing_factor)
                how = loss if self._what == "gradient" else None
                recording = capture(kwargs["model"], draft, tokenizer=words, what=self._what, training=how)
                self._seen = stack.enter_context(recording)
                self._open = stack.pop_all()
        if self._seen is not None:
            self._rates.append(float(kwargs["optimizer"].param_groups[0]["lr"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what is complete."""
        steps = state.global_step - self._first
        if self._seen is not None and (self._what == "gradient" or steps == self._every):
            self._write(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the last round, where it was begun."""
        if self._seen is not None:
            self._write(args, state)

    def _write(self, args: Any, state: Any) -> None:
        seen, self._seen, stack = self._seen, None, self._open.pop_all()
        with swallowing(self._name()), stack:
            assert seen is not None
            if self._what == "delta":
                seen.training = self._told(args)
                # beyond one pass over the data rows were seen more than once
                seen.told = seen.sentences if state.epoch is None or state.epoch <= 1 else None
        self._made += 1

    def _name(self) -> str:
        """Return the folder's name: the step, counted from 1, or the round."""
        if self._what == "gradient":
            return f"step-{self._first + 1}"
        return f"round-{self._first // self._every + 1}"

    def _told(self, args: Any) -> LocalTraining | None:
        """Return how the steps of a round were made; None where that cannot be said as attacks are told it."""
        optimizer = _OPTIMIZERS.get(str(getattr(args.optim, "value", args.optim)))
        falling = [self._rates[0] * (len(self._rates) - n) / len(self._rates) for n in range(len(self._rates))]
        schedule: Literal["constant", "linear"] | None = None
        for name, wanted in (("constant", [self._rates[0]] * len(self._rates)), ("linear", falling)):
            if schedule is None and all(abs(a - b) <= 1e-6 * b for a, b in zip(self._rates, wanted, strict=True)):
                schedule = name  # type: ignore[assignment]
        # behind the first round Adam remembers, which an attacker cannot be told
        remembers = optimizer == "adamw" and self._first > 0
        if optimizer is None or schedule is None or remembers or self._rates[0] <= 0:
            return None
        several = len(self._rates) > 1 or args.gradient_accumulation_steps > 1
        return LocalTraining(
            optimizer,
            self._rates[0],
            minibatch=args.train_batch_size if several else None,
            weight_decay=args.weight_decay,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            clip_norm=args.max_grad_norm or None,
            schedule=schedule,
            accumulate=args.gradient_accumulation_steps,
            precision=_precision(args),
            label_smoothing=args.label_smoothing_factor,
        )


def _precision(args: Any) -> Precision:
    if args.bf16:
        return "bf16"
    return "fp16" if args.fp16 else "fp32"
