"""`gradaudit.bundle`: what a training changed between two checkpoints, as a bundle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradaudit.bundles.bundle import MANIFEST, built_defenses, knowledge_problem, preflight, save_bundle
from gradaudit.bundles.checkpoints import (
    Weights,
    folder_of,
    holds_adapter,
    in_order,
    read_module,
    read_tokenizer,
    read_weights,
)
from gradaudit.bundles.own_model import text_task, write_adapters, write_model
from gradaudit.bundles.precision import with_precision
from gradaudit.errors import BadInputError
from gradaudit.files import replacing_folder
from gradaudit.models.lora import AdapterConfig, PeftNames, add_adapters, read_adapter_config, saved_shapes
from gradaudit.models.spec import Lora, Task
from gradaudit.models.state import fingerprint_of
from gradaudit.models.transformers import TransformersModel
from gradaudit.types import Knowledge, LocalTraining, Update

_ALIKE = 0.5
"""Cosine of all weights before and after below which one is not the other, trained on: MiniLM has 0.9999 behind 200
steps of AdamW, 0.09 with a random model of its shape, and a change in the place of weights has nothing of them."""


_SAME = 0.99
"""Cosine of weights and a change of about their size above which the change is no training's."""


@dataclass(frozen=True)
class _Trained:
    """A model at the weights before, and both states by its own names."""

    module: Any
    task: Task
    config: AdapterConfig | None
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def bundle(
    before: Weights,
    after: Weights,
    *,
    out: str | Path,
    base: Any = None,
    tokenizer: Any = None,
    dropout: bool | float | None = None,
    training: LocalTraining | None = None,
    sentences: int | None = None,
    defenses: Sequence[Mapping[str, Any]] | None = None,
) -> Path:
    """Write what a training changed between two checkpoints as a bundle that `gradaudit attack` reads.

    What is not told stays unknown, and the attacker is not given it.

    Args:
        before: the weights that the client started from: a folder of `save_pretrained` or of a peft adapter, a file
            (.safetensors, .pt, .npz), tensors by name, or arrays in the order of the model's `state_dict`.
        after: the weights that it sent, in any of these forms.
        out: folder of the bundle; a bundle already in it is replaced.
        base: folder, embedded name or hub id of the model under adapters, or of configuration and tokenizer where
            `before` is no folder; a transformers model itself in the latter case, which is left as it is. Of a peft
            model `before` and `after` hold what clients send, and all else is the model's own.
        tokenizer: the model's, a folder or a hub id; as the checkpoints have it when None.
        dropout: True: on, at the model's rate; False: off; a rate; None: not known.
        training: how the steps were made; None: not known.
        sentences: how many they were made on; None: not known.
        defenses: descriptions of what acted on the update; empty: nothing did; None: not known.

    Returns:
        The folder of the bundle.

    Raises:
        BadInputError: checkpoints that cannot be read or are not of one model, or nothing changed; nothing is written.
        NotSupportedError: a model of another family or task.
    """
    folder = Path(out)
    if folder.exists() and not (folder / MANIFEST).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError(f"{folder} is there and is no bundle; choose another folder")
    built_defenses(defenses or ())
    if getattr(base, "peft_config", None):
        trained = _sent_adapters(before, after, base)
    else:
        trained = (_adapters if holds_adapter(before) or holds_adapter(after) else _whole)(before, after, base)
    folders = [place for place in (before, after) if isinstance(place, str | Path) and Path(place).is_dir()]
    words = read_tokenizer((tokenizer, *folders, folder_of(base) if isinstance(base, str | Path) else None))
    tensors = _changes(trained)
    training = with_precision(training, trained.before, tensors, "delta")
    with replacing_folder(folder) as draft:
        modes = [(part, part.training) for part in trained.module.modules()]
        if trained.config is not None:
            model = write_adapters(trained.module, trained.config, draft, words, trained.task, trained.before)
        else:
            model = write_model(trained.module, draft, words, trained.task, trained.before)
        for part, training_before in modes:  # of a model that a caller goes on with
            part.training = training_before
        knowledge = Knowledge(
            batch_size=sentences,
            training=training,
            dropout=_rate(model, dropout),
            defenses=None if defenses is None else tuple(defenses),
        )
        problem = knowledge_problem(knowledge)
        if problem:
            raise BadInputError(f"what was told of the training cannot be: {problem}")
        wrong = [found.text for found in preflight(model, tensors) if found.level == "error"]
        if wrong:
            raise BadInputError(f"the change between the checkpoints cannot be attacked: {wrong[0]}")
        own = fingerprint_of({name: trained.before[name] for name in model.parameters()})
        update = Update(tensors, "delta", training or LocalTraining(), knowledge.dropout or 0.0)
        save_bundle(draft, model, update, knowledge, inside=True, fingerprint=own)
    return folder


def _rate(model: TransformersModel, dropout: bool | float | None) -> float | None:
    if dropout is True:
        return model.dropout_rate()
    return None if dropout is None else float(dropout)


def _whole(before: Weights, after: Weights, base: Any) -> _Trained:
    """Return a training of the model itself."""
    if isinstance(before, str | Path) and Path(before).is_dir():
        module, task = read_module(Path(before))
        start = dict(module.state_dict())
    elif isinstance(before, str | Path) and not Path(before).exists():
        raise BadInputError(f"there is no file or folder {before}; check the path")
    elif base is None:
        raise BadInputError(
            "weights without a configuration need the folder of their model: --base MODEL, in Python base=..."
        )
    else:
        module, task = (
            read_module(folder_of(base)) if isinstance(base, str | Path) else (base, text_task(type(base).__name__))
        )
        start = read_weights(before, module.state_dict(), "before")
    return _Trained(module, task, None, start, read_weights(after, module.state_dict(), "after"))


def _adapters(before: Weights, after: Weights, base: Any) -> _Trained:
    """Return a training of LoRA adapters and what peft saves with them."""
    if not (holds_adapter(before) and holds_adapter(after)):
        other = after if holds_adapter(before) else before
        raise BadInputError(f"{other} holds no adapter and the other checkpoint does: give two adapter folders")
    if not isinstance(base, str | Path):
        raise BadInputError("adapters need the model that they stand beside: --base MODEL, in Python base=...")
    first, second = Path(str(before)), Path(str(after))
    config = read_adapter_config(first)
    if read_adapter_config(second) != config or saved_shapes(first) != saved_shapes(second):
        raise BadInputError(f"{first} and {second} hold different adapters: rank, scale or matrices are not the same")
    shapes = saved_shapes(first)
    own = [name for name in shapes if ".lora_" not in name]
    head = next((shapes[name][0] for name in own if name.endswith("weight") and "dense" not in name), None)
    module, task = read_module(folder_of(base), head, own)
    add_adapters(module, Lora(folder=str(first)), 0)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    module_after, _ = read_module(folder_of(base), head, own)
    add_adapters(module_after, Lora(folder=str(second)), 0)
    return _Trained(module, task, config, start, dict(module_after.state_dict()))


def _sent_adapters(before: Weights, after: Weights, base: Any) -> _Trained:
    """Return a training of a peft model of which clients send what is trained, as federations of adapters do."""
    if isinstance(before, str | Path) or isinstance(after, str | Path):
        raise BadInputError("with a peft model as base, before and after are its tensors by name or in order")
    adapted = PeftNames(base)
    own = adapted.plain(base.state_dict())
    order = adapted.sent_names()
    states = []
    for part, source in (("before", before), ("after", after)):
        items = adapted.plain(source if isinstance(source, Mapping) else in_order(source, order, part))
        surplus = sorted(set(items) - set(own))
        if surplus or not items:
            held = surplus[0] if surplus else "nothing"
            raise BadInputError(f"the weights {part} hold {held}, which the base with its adapters does not have")
        shapes = {name: value for name, value in own.items() if name in items}
        states.append(own | read_weights(items, shapes, part))
    return _Trained(adapted.base, text_task(type(adapted.base).__name__), adapted.described(), states[0], states[1])


def _changes(trained: _Trained) -> dict[str, Tensor]:
    """Return what changed, by parameter name; what did not was not trained.

    Raises:
        BadInputError: nothing did, or the weights after are not those before, trained on.
    """
    names = [name for name, _ in trained.module.named_parameters() if name in trained.before]
    if trained.config is not None:
        names = [name for name in trained.before if trained.before[name].is_floating_point()]
    one, other = ({n: state[n] for n in names} for state in (trained.before, trained.after))
    found = {name: other[name] - one[name] for name in names if not torch.equal(one[name], other[name])}
    if not found:
        raise BadInputError("the weights before and after are the same: nothing was trained between them")
    likeness, ratio = _likeness(one, other)
    # noise as large as the weights leaves less likeness too, and makes them larger
    if likeness < _ALIKE and ratio < 1 / _ALIKE:
        raise BadInputError(
            f"the weights after are not those before, trained on (likeness {likeness:.2f}): they are of another model, "
            "or a change was given in their place"
        )
    same, size = _likeness(one, {name: found.get(name, torch.zeros(())).expand_as(one[name]) for name in names})
    if same > _SAME and size > _ALIKE:
        raise BadInputError("the change is the weights themselves: weights were given where a change was expected")
    return found


def _likeness(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the cosine of two models, and how many times the one the other is."""

    def product(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
        return sum(float((a[name].detach().double() * b[name].detach().double()).sum()) for name in a)

    own, others = product(one, one) ** 0.5, product(other, other) ** 0.5
    return (product(one, other) / (own * others) if own * others > 0 else 0.0), others / own if own > 0 else 1.0
