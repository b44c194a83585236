"""LoRA through peft: small adapters are trained in place of the matrices they stand beside."""

import re
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import Tensor

from gradaudit import files
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.families import FAMILIES
from gradaudit.models.spec import Lora, roles_of
from gradaudit.streams import global_stream, stream

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a saved adapter, as peft names them."""
_BEFORE = "base_model.model."
"""What peft puts before the names of the model's own parameters."""
_BITSANDBYTES = "bitsandbytes"
"""How transformers calls the way of packing that the base of QLoRA has."""
_PLAIN = re.compile(r"[\w.]+")


class AdapterConfig(BaseModel):
    """What of peft's `adapter_config.json` decides what an adapter computes; it may come from elsewhere.

    Which matrices have adapters, and of which rank, is read off the tensors.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    peft_type: Literal["LORA"] = "LORA"
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    alpha_pattern: dict[str, float] = Field(default_factory=dict)


def add_adapters(module: Any, lora: Lora, seed: int, depth: int | None = None) -> None:
    """Put adapters beside a transformers model's matrices, in place; all but them and the task head is frozen.

    Args:
        module: the model; its forward pass stays its own.
        lora: which adapters.
        seed: A is drawn from it, where no saved adapter is named.
        depth: blocks of the model, where the module holds only the first of them: what a saved adapter has beside the
            others is left out. None: the module holds all.

    Raises:
        BadInputError: the extra "lora" (package peft) is not installed, or a saved adapter is not of this model.
    """
    family = FAMILIES[module.config.model_type](module)
    if lora.folder is not None:
        behind = range(len(family.blocks), depth or 0)
        _add_saved(module, Path(lora.folder), tuple(f"{family.base}.{family.block_list}.{n}." for n in behind))
    else:
        every = range(len(family.blocks))
        blocks = lora.blocks or every
        if beyond := [block for block in blocks if block not in every]:
            raise BadInputError(f"[lora] blocks: there is no block {beyond[0]}; this model has 0 to {every[-1]}")
        views = [view for block in blocks for role in roles_of(lora.modules) for view in family.views(block, role)]
        widest = max(max(module.get_parameter(view.parameter).shape) for view in views)
        if lora.rank > widest:  # before memory is taken
            raise BadInputError(f"LoRA of rank {lora.rank} is above every width of its matrices; at most {widest}")
        how = {
            "r": lora.rank,
            "lora_alpha": lora.alpha if lora.alpha is not None else 2 * lora.rank,
            "lora_dropout": lora.dropout,
            "target_modules": sorted({view.parameter.removesuffix(".weight") for view in views}),
            "fan_in_fan_out": any(view.transpose for view in views),
        }
        _inject(module, how, seed)
    for name, p in module.named_parameters():
        if name.startswith(family.head):
            p.requires_grad_(True)


def _inject(module: Any, how: Mapping[str, Any], seed: int = 0) -> None:
    try:
        import peft
    except ImportError:
        raise BadInputError("LoRA needs the extra: pip install 'gradaudit[lora]'") from None
    with global_stream(stream(seed, "lora"), torch.device("cpu")):  # a training that is recorded draws none of it
        peft.inject_adapter_in_model(peft.LoraConfig(**how), module)


def _add_saved(module: Any, folder: Path, left_out: tuple[str, ...]) -> None:
    """Put an adapter that was trained elsewhere beside the matrices that its tensors name; see `add_adapters`.

    Args:
        module: the model.
        folder: of the adapter.
        left_out: what the names of blocks that are not loaded begin with.
    """
    config = read_adapter_config(folder)
    with files.stored_tensors(folder / WEIGHTS) as file:
        every = {name: _plain(name) for name in file.shapes}
        names = {name: plain for name, plain in every.items() if not plain.startswith(left_out)}
        if every and not any(".lora_" in plain for plain in names.values()) and left_out:
            raise BadInputError(f"the adapter in {folder} stands beside later blocks alone: ask for more with --blocks")
        stems = {p.partition(".lora_A.")[0]: file.shapes[n][0] for n, p in names.items() if ".lora_A." in p}
        matrices = {name.removesuffix(".weight"): p for name, p in module.named_parameters() if p.dim() == 2}
        if not stems or not stems.keys() <= matrices.keys():
            strange = next((stem for stem in stems if stem not in matrices), "no matrix at all")
            raise BadInputError(f"the adapter in {folder} is of another base model: it stands beside {strange}")
        shapes = {plain: file.shapes[name] for name, plain in names.items()}
        for stem, rank in stems.items():  # before anything is made of them: a rank takes memory
            pair = (shapes.get(_half(stem, "A")), shapes.get(_half(stem, "B")))
            sizes = tuple(matrices[stem].shape)
            if not any(pair == ((rank, inner), (outer, rank)) for outer, inner in (sizes, sizes[::-1])):
                raise BadInputError(f"the adapter in {folder} is of another base model: {stem} is {list(sizes)} here")
        _inject(
            module,
            {
                "r": config.r,
                "lora_alpha": config.lora_alpha,
                "lora_dropout": config.lora_dropout,
                "use_rslora": config.use_rslora,
                "fan_in_fan_out": config.fan_in_fan_out,
                "target_modules": sorted(stems),
                "rank_pattern": {stem: rank for stem, rank in stems.items() if rank != config.r},
                "alpha_pattern": config.alpha_pattern,
            },
        )
        own = dict(module.named_parameters())
        for name, plain in names.items():
            if plain not in own or tuple(own[plain].shape) != file.shapes[name]:
                raise BadInputError(f"the adapter in {folder} is of another base model: '{name}' does not fit it")
        with torch.no_grad():
            for name, value in file.read(names).items():
                own[names[name]].copy_(value)


def _half(stem: str, half: str) -> str:
    """Return the name of A or B beside a matrix."""
    return f"{stem}.lora_{half}.default.weight"


def unstepped(weights: Mapping[str, Tensor], name: str) -> bool:
    """Say whether an adapter made no step yet: B beside an A is zero, so that A has no gradient.

    Args:
        weights: the model's parameters.
        name: A's.
    """
    beside = weights.get(name.replace(".lora_A.", ".lora_B."))
    return beside is not None and not bool(beside.any())


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return a saved adapter's configuration.

    Raises:
        BadInputError: no such file, or one that is not understood.
        NotSupportedError: an adapter that is more than LoRA.
    """
    if not (folder / CONFIG).is_file():
        raise BadInputError(f"{folder} holds no adapter: it has no {CONFIG}")
    config = files.read_manifest(folder / CONFIG, AdapterConfig, "the configuration of a LoRA adapter")
    if config.use_dora or config.bias != "none":
        raise NotSupportedError(f"the adapter in {folder} is more than LoRA (DoRA, or trained biases): not supported")
    if not all(_PLAIN.fullmatch(key) for key in config.alpha_pattern):
        raise BadInputError(f"{folder / CONFIG}: alpha_pattern is read as names of matrices, not as expressions")
    return config


def _plain(name: str) -> str:
    """Return a tensor's name as the model with injected adapters has it, from that of peft's file or module."""
    name = name.removeprefix(_BEFORE)
    name = re.sub(r"\.(lora_[AB])\.(?:\w+\.)?weight$", r".\1.default.weight", name)
    return re.sub(r"\.modules_to_save\.\w+\.", ".", name)


class PeftNames:
    """Parameters of a model with peft's adapters, by the names that this package's own models have.

    Args:
        model: a `PeftModel`, or a transformers model that adapters were added to.

    Raises:
        NotSupportedError: adapters other than LoRA, merged ones, or a base packed by other than bitsandbytes.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        active = model.active_adapters
        active = list(active() if callable(active) else active)  # transformers has a method, peft a property
        if len(active) != 1:
            raise NotSupportedError(f"capture takes a model with one active adapter, and {len(active)} are active")
        self.name = str(active[0])
        self.config = model.peft_config[self.name]
        kind = str(getattr(self.config.peft_type, "value", self.config.peft_type))
        if kind != "LORA" or self.config.use_dora or self.config.bias != "none":
            raise NotSupportedError(f"capture takes LoRA adapters, not {kind} with DoRA, biases or others of its kinds")
        if any(getattr(part, "merged", False) for part in model.modules()):
            raise NotSupportedError("the adapters are merged into the model: call unmerge_adapter() before capture")
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model

        method = getattr(self.base, "quantization_method", _BITSANDBYTES)
        if str(getattr(method, "value", method)) != _BITSANDBYTES:
            raise NotSupportedError(f"capture takes a base in floats or packed by {_BITSANDBYTES}, not by {method}")

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the model's state by its own names; a packed base (QLoRA) as the numbers it stands for."""
        found = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        for name, part in self.model.named_modules():
            # its own: peft's layers show the weight of the one that they hold
            weight = dict(part.named_parameters(recurse=False)).get("weight")
            if weight is not None and not weight.is_floating_point():
                from peft.utils.integrations import dequantize_bnb_weight

                for scale in [n for n in found if n.startswith(f"{name}.") and n != f"{name}.bias"]:
                    del found[scale]
                # of a copy: peft writes the scales of eight bits into it
                found[f"{name}.weight"] = dequantize_bnb_weight(weight, copy(getattr(part, "state", None)))
        return found

    def plain(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by name as this package has them: the active adapter's, and the parameters in use."""
        found = {}
        mark = f".lora_A.{self.name}."
        adapted = {_plain(n).partition(".lora_A.")[0] for n, _ in self.base.named_parameters() if mark in n}
        for name, value in tensors.items():
            kept = re.search(r"\.(?:lora_[AB]|modules_to_save)\.(\w+)\.", name)
            if ".original_module." not in name and (kept is None or kept[1] == self.name):
                plain = _plain(name)
                stem, inside, rest = plain.partition(".base_layer.")
                found[plain if not inside or stem in adapted else f"{stem}.{rest}"] = value
        return found

    def sent_names(self) -> list[str]:
        """Return the names of what a federation of adapters sends, in peft's order."""
        import peft

        return list(peft.get_peft_model_state_dict(self.model, adapter_name=self.name))

    def described(self) -> AdapterConfig:
        """Return what decides what the active adapter computes."""
        mark = f".lora_A.{self.name}."
        stems = {_plain(name).partition(".lora_A.")[0] for name, _ in self.base.named_parameters() if mark in name}
        layers = dict(self.base.named_modules())
        return AdapterConfig(
            r=self.config.r,
            lora_alpha=self.config.lora_alpha,
            lora_dropout=self.config.lora_dropout,
            use_rslora=self.config.use_rslora,
            fan_in_fan_out=self.config.fan_in_fan_out,
            alpha_pattern={stem: float(layers[stem].lora_alpha[self.name]) for stem in sorted(stems)},
        )


def save_adapters(config: AdapterConfig, weights: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Write an adapter's weights into a folder, and return the base model's own.

    Args:
        config: what the adapter computes.
        weights: of base and adapter, by names as this package's own models have them.
        folder: made when it is not there.
    """
    adapters = {name: value for name, value in weights.items() if ".lora_" in name}
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / CONFIG).write_text(config.model_dump_json(indent=1), encoding="utf8")
    stored = {_BEFORE + name.replace(".default.", "."): t.cpu().contiguous() for name, t in adapters.items()}
    save_file(stored, folder / WEIGHTS)
    return {name.replace(".base_layer.", "."): value for name, value in weights.items() if name not in adapters}


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a saved adapter, by names as this package's own models have them.

    Raises:
        BadInputError: no weights, or damaged ones.
    """
    with files.stored_tensors(folder / WEIGHTS) as file:
        return {_plain(name): shape for name, shape in file.shapes.items()}
