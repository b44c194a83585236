"""`gradaudit.capture`: writes the update of one step of the user's own PyTorch loop as a bundle."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradaudit.bundles.bundle import save_bundle
from gradaudit.bundles.mechanism import read_mechanism
from gradaudit.bundles.model import MODEL, WEIGHTS
from gradaudit.bundles.own_model import text_task, write_adapters, write_model
from gradaudit.bundles.precision import with_precision
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.images import IMAGE_MODELS, ImageModel, LeNet, ResNet
from gradaudit.models.lora import PeftNames
from gradaudit.models.spec import ModelSpec, Task
from gradaudit.models.state import fingerprint_of
from gradaudit.models.transformers import TransformersModel
from gradaudit.types import Knowledge, LocalTraining, Update

ARCHITECTURES: dict[type[nn.Module], str] = {LeNet: "lenet", ResNet: "resnet"}
"""Modules of images that can be captured, with the name that makes them anew."""

_PRIVATE = "GradSampleModule"
"""How the classes begin that Opacus wraps a model in."""


@dataclass
class Capture:
    """What a capture has seen so far.

    Args:
        steps: optimizer steps taken inside the block.
        sentences: rows of `input_ids`, or images, passed through the model in training.
        shape: channels, height and width of the images; None of text.
        dropout: the model was in training mode when it ran.
        training: how the steps were made, of a weight change; None: the attacker is not told. It may be set until the
            block ends.
        told: how many sentences a weight change was made on; None: the attacker is not told. The same.
    """

    steps: int = 0
    sentences: int = 0
    dropout: bool = False
    shape: tuple[int, int, int] | None = None
    training: LocalTraining | None = None
    told: int | None = None
    gradient: dict[str, Tensor] = field(default_factory=dict, repr=False)


@contextmanager
def capture(
    model: Any,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    what: Literal["gradient", "delta"] = "gradient",
    training: LocalTraining | None = None,
    sentences: int | None = None,
    optimizer: Any = None,
) -> Iterator[Capture]:
    """Write what one step of your own training would send, as a bundle that `gradaudit attack` reads.

    Put it around the step::

        with gradaudit.capture(model, "update", tokenizer=tokenizer):
            loss = model(**batch, labels=labels).loss
            loss.backward()
            optimizer.step()

    The gradient is taken as the optimizer gets it, after your own clipping, from the first step inside the block, or
    from the parameters at the end when no optimizer ran. The weights before the step go into the bundle as well: an
    attacker in a federated training has them. The batch does not; only its number of sentences does.

    Args:
        model: a transformers model for sequence classification or causal language modeling, as it is, with LoRA
            adapters of peft, or as Opacus' PrivacyEngine wraps it; or a `LeNet` or `ResNet` of
            `gradaudit.models.images`, which takes images in 0 to 1.
        folder: where the bundle goes.
        tokenizer: the model's tokenizer; None for a model of images.
        what: "gradient" (FedSGD), or "delta": the weight change over all steps of the block (FedAvg).
        training: for "delta", how the steps were made, when the attacker is to know it.
        sentences: for "delta", how many sentences or images they were made on, when the attacker is to know it; for a
            gradient they are counted (several passes over a batch would count it several times).
        optimizer: of a model in Opacus' PrivacyEngine its DPOptimizer, whose bound and noise go into the bundle.

    Raises:
        BadInputError: no gradient appeared, more than one step in gradient mode, or the folder cannot be written.
        NotSupportedError: not a model of a supported family and task, or one of several processes of a training.
    """
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise NotSupportedError(
            f"capture takes a training in one process, and this is one of {torch.distributed.get_world_size()}: each "
            "holds its own part of the batch alone"
        )
    private = type(model).__name__.startswith(_PRIVATE)
    if private:
        model = model._module
    task = _task(model)
    if optimizer is not None:
        read_mechanism(optimizer, 1)
    if tokenizer is None and task != "image-classification":
        raise BadInputError("capture of a model of text needs its tokenizer: capture(model, folder, tokenizer=...)")
    adapted = PeftNames(model) if getattr(model, "peft_config", None) else None
    before = adapted.state() if adapted else {n: value.detach().clone() for n, value in model.state_dict().items()}
    seen = Capture(training=training, told=sentences)
    names = {id(p): name for name, p in model.named_parameters()}

    def on_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        if not mine:
            return
        seen.steps += 1
        if seen.steps == 1 and what == "gradient":
            seen.gradient = {names[id(p)]: p.grad.detach().clone() for p in mine if p.grad is not None}

    def on_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs_embeds"))
        if torch.is_grad_enabled() and isinstance(ids, Tensor):
            seen.sentences += len(ids)
            seen.shape = (int(ids.shape[1]), int(ids.shape[2]), int(ids.shape[3])) if ids.dim() == 4 else None
            # peft's wrapper calls itself training whatever the model in it does
            seen.dropout = any(part.training for part in module.modules() if part is not module)

    hooks = [register_optimizer_step_pre_hook(on_step), model.register_forward_pre_hook(on_forward, with_kwargs=True)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
    if private and not seen.steps:
        raise BadInputError("the optimizer took no step inside capture, and the private gradient is made by its step")
    tensors = _tensors(model, before, seen, what)
    _make_private(Path(folder))
    size = (seen.sentences or None) if what == "gradient" else seen.told
    modes = [(part, part.training) for part in model.modules()]
    wrapped: TransformersModel | ImageModel
    if adapted is not None:
        tensors, before = adapted.plain(tensors), adapted.plain(before)
        wrapped = write_adapters(adapted.base, adapted.described(), Path(folder), tokenizer, task, before)
    elif task == "image-classification":
        wrapped = _of_images(model, Path(folder), before, seen.shape)
    else:
        wrapped = write_model(model, Path(folder), tokenizer, task, before)
    for part, training_before in modes:
        part.training = training_before
    rate = wrapped.dropout_rate() if seen.dropout else 0.0
    how = with_precision(seen.training or (LocalTraining() if what == "gradient" else None), before, tensors, what)
    update = Update(tensors=tensors, kind=what, training=how or LocalTraining(), dropout=rate)
    mechanism = None if optimizer is None else read_mechanism(optimizer, seen.steps)
    # whether other defenses act is not to be seen here
    defended = None if mechanism is None else (mechanism.defense(),)
    known = Knowledge(batch_size=size, training=how, dropout=rate, defenses=defended)
    # adapters were read back from the bundle, with the weights before the step
    own = adapted is not None
    # a model is read back in float32, whatever it was trained in
    wide = {name: before[name].float() for name in wrapped.parameters()} if not own else {}
    fingerprint = wrapped.fingerprint() if own else fingerprint_of(wide)
    save_bundle(Path(folder), wrapped, update, known, inside=True, fingerprint=fingerprint, mechanism=mechanism)


def _make_private(folder: Path) -> None:
    """Make the bundle's folders for their owner alone; one that is there stays as it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / MODEL).mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise BadInputError(f"cannot write the bundle {folder} ({error.strerror}); choose another folder") from None


def _tensors(model: Any, before: dict[str, Tensor], seen: Capture, what: str) -> dict[str, Tensor]:
    if what == "delta":
        # the difference of two weights of half precision seldom fits in half precision
        return {n: p.detach().float() - before[n].float() for n, p in model.named_parameters() if p.requires_grad}
    if seen.steps > 1:
        raise BadInputError(
            f'{seen.steps} optimizer steps ran inside capture; take one, or use what="delta" for their weight change'
        )
    found = seen.gradient or {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    if not found:
        raise BadInputError("no gradient appeared inside capture; call loss.backward() within the block")
    return found


def _of_images(
    model: LeNet | ResNet, folder: Path, before: dict[str, Tensor], shape: tuple[int, int, int] | None
) -> ImageModel:
    """Write the weights before the step into the bundle and return the model."""
    if shape is None:
        raise BadInputError("no images [B, C, H, W] went through the model inside capture; run it within the block")
    name = ARCHITECTURES[type(model)]
    try:
        save_file({n: t.cpu().contiguous() for n, t in before.items()}, folder / MODEL / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"cannot write the bundle {folder} ({error}); choose another folder") from None
    labels = model.head.out_features
    spec = ModelSpec(name, "image-classification", labels, image=shape)
    return ImageModel(model, spec, model.features, IMAGE_MODELS[name].depth)


def _task(model: Any) -> Task:
    if type(model) in ARCHITECTURES:
        return "image-classification"
    return text_task(type(model).__name__)
