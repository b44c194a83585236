"""Weights of a model before and after a training, from the files that trainings leave: as untrusted as a bundle."""

import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradaudit import files
from gradaudit.bundles.model import check_size
from gradaudit.bundles.own_model import text_task
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.families import family_of
from gradaudit.models.lora import CONFIG as ADAPTER_CONFIG
from gradaudit.models.spec import ModelSpec, Task
from gradaudit.models.zoo import EMBEDDED, first_line, quiet

Weights = str | Path | Mapping[str, Any] | Sequence[Any]
"""A folder of `save_pretrained`, a file of weights, tensors by name, or arrays in the order of the model's state."""
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_INSIDE = ("state_dict", "model_state_dict", "model")
"""Under which a file of torch may hold the weights beside other things."""
_WRAPPERS = ("module.", "_orig_mod.", "_module.")
"""What wrappers (parallel training, torch.compile, Opacus) put before every name."""


def holds_adapter(source: Weights) -> bool:
    """Return whether a checkpoint is an adapter folder of peft."""
    return isinstance(source, str | Path) and (Path(source) / ADAPTER_CONFIG).is_file()


def refuse_checkpoints(folders: Sequence[Path]) -> None:
    """Refuse what holds a model or an adapter in the place of a bundle, and say how a bundle is made of two.

    Args:
        folders: what was given for bundles.

    Raises:
        BadInputError: one of them is a checkpoint.
    """
    found = [path for path in folders if holds_adapter(path) or (path / "config.json").is_file() or _is_weights(path)]
    if found:
        before, after = (*found, Path("OTHER"))[:2]
        base = " --base MODEL" if not (before / "config.json").is_file() else ""
        raise BadInputError(
            f"{found[0]} is a checkpoint and no bundle, and an update is what changed between two: "
            f"gradaudit bundle OUT --before {before} --after {after}{base}"
        )


def _is_weights(path: Path) -> bool:
    return path.is_file() and path.suffix in (".safetensors", ".npz", *_PICKLED)


def folder_of(name: str | Path) -> Path:
    """Return the folder of a model by its path, embedded name or hub id.

    Raises:
        BadInputError: no such folder, and no hub that has it.
    """
    if Path(name).exists() or str(name).startswith((".", "/", "~")):
        return Path(name)
    if str(name) in EMBEDDED:
        return EMBEDDED[str(name)].folder()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]))
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInputError(
            f"'{name}' is no folder, no embedded model ({', '.join(EMBEDDED)}) and no hub id that can be reached "
            f"({first_line(error)})"
        ) from None


@quiet()
def read_module(folder: Path, labels: int | None = None, given: Iterable[str] = ()) -> tuple[Any, Task]:
    """Return the model in a folder of `save_pretrained`, in float32, and what it is for.

    Args:
        folder: one file of weights or several, of any float type.
        labels: number of classes; as the folder says when None.
        given: names of parameters that come from elsewhere and may be missing here.

    Raises:
        BadInputError: no such folder, weights as pickle, or missing and surplus ones.
        NotSupportedError: another task or family, or a quantized model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    if not (folder / "config.json").is_file():
        raise BadInputError(f"{folder} is no folder of save_pretrained: it has no config.json")
    if not list(folder.glob("*.safetensors")):
        pickled = next((path.name for path in sorted(folder.glob("*.bin"))), None)
        read = f": give {folder / pickled} and --base {folder}" if pickled else ""
        raise BadInputError(f"{folder} holds no weights as safetensors{read}")
    check_size(folder, ModelSpec(str(folder)))
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            raise NotSupportedError(f"the model in {folder} is quantized; give the weights in floats")
        family_of(str(folder), config.model_type)
        task = _task(config, given)
        if labels is not None:
            config.num_labels = labels
        auto = AutoModelForSequenceClassification if task == "classification" else AutoModelForCausalLM
        module, info = auto.from_pretrained(
            str(folder),
            config=config,
            attn_implementation="eager",
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        raise BadInputError(f"the model in {folder} cannot be read ({first_line(error)})") from None
    absent = {str(name) for name in info["missing_keys"]} | {str(name[0]) for name in info["mismatched_keys"]}
    absent -= set(given)
    if absent:
        raise BadInputError(
            f"{folder} lacks {len(absent)} weights of its model or has them in other shapes, the first is "
            f"'{min(absent)}'; a whole checkpoint is needed"
        )
    surplus = {str(name) for name in info["unexpected_keys"] if not str(name).endswith("position_ids")}
    if surplus and not given:
        raise BadInputError(f"{folder} holds {len(surplus)} weights that are not its model's, as '{min(surplus)}'")
    return module.eval(), task


def _task(config: Any, given: Iterable[str]) -> Task:
    """Return what a configuration's model is for; of a base without a head what its adapter's head says."""
    if any(name.startswith(("classifier.", "score.")) for name in given):
        return "classification"
    return text_task(str((config.architectures or ["a configuration without architectures"])[0]))


def read_tokenizer(places: Iterable[Any]) -> Any:
    """Return the first tokenizer that is found.

    Args:
        places: tokenizers themselves, folders, embedded names or hub ids; None is passed over.

    Raises:
        BadInputError: there is none.
    """
    from transformers import AutoTokenizer

    for place in places:
        if place is None or callable(place):
            if place is not None:
                return place
            continue
        name = str(EMBEDDED[str(place)].folder()) if str(place) in EMBEDDED else str(place)
        if Path(name).is_dir() and not any(
            (Path(name) / f).is_file() for f in ("tokenizer.json", "vocab.txt", "vocab.json")
        ):
            continue
        try:
            return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise BadInputError(f"'{place}' has no readable tokenizer ({first_line(error)})") from None
    raise BadInputError(
        "the checkpoints hold no tokenizer: name one with --tokenizer (a folder or a hub id), in Python tokenizer=..."
    )


def read_weights(source: Weights, state: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return weights in float32 by the names of a model.

    Args:
        source: a folder, a file, tensors by name, or arrays in the state's order.
        state: the model's `state_dict`, for names and shapes.
        part: "before" or "after", for messages.

    Raises:
        BadInputError: an unreadable file, code in it, or tensors that are not this model's.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        if path.is_dir():
            return _named(read_module(path)[0].state_dict(), state, str(path))
        return _from_file(path, state)
    if isinstance(source, Mapping):
        return _named({str(name): value for name, value in source.items()}, state, part)
    return _named(_numbered(source), state, part)


def _from_file(path: Path, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not path.is_file():
        raise BadInputError(f"no such checkpoint: {path}")
    if path.suffix == ".safetensors":
        with files.stored_tensors(path) as file:
            _fit(_renamed(file.shapes, state, str(path)), state, str(path))  # before anything is read
            return _named(file.read(file.shapes), state, str(path))
    if path.suffix == ".npz":
        return _named(_arrays(path, state), state, str(path))
    if path.suffix in _PICKLED:
        return _named(_from_torch(path), state, str(path))
    raise BadInputError(f"{path} is no checkpoint: give a folder of save_pretrained, .safetensors, .pt or .npz")


def _from_torch(path: Path) -> dict[str, Any]:
    """Return the tensors of a file of torch, which is read without running what may be in it."""
    if not zipfile.is_zipfile(path):  # what torch 1.5 and pickle itself write cannot be mapped
        raise BadInputError(
            f"{path} is no file of torch 1.6 or later: write it anew with torch.save(model.state_dict())"
        )
    try:
        # mapped, so that sizes which the file does not hold take no memory
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise BadInputError(
            f"{path} holds pickled code beside weights, which is not run; save its state_dict"
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, AttributeError) as error:
        raise BadInputError(f"{path} cannot be read as weights ({first_line(error)})") from None
    for key in _INSIDE:
        if isinstance(held, dict) and isinstance(held.get(key), dict):
            held = held[key]
    if isinstance(held, list | tuple):
        return _numbered(held)
    if not isinstance(held, dict):
        raise BadInputError(f"{path} holds no weights by name, but a {type(held).__name__}; save its state_dict")
    return {str(name): value for name, value in held.items()}


def _arrays(path: Path, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arrays of a NumPy file, whose headers are looked at before any array is made."""
    try:
        with zipfile.ZipFile(path) as archive:
            shapes = {}
            for name in archive.namelist():
                with archive.open(name) as file:
                    version = np.lib.format.read_magic(file)
                    read = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shapes[name.removesuffix(".npy")] = read(file)[0]
        _fit(_renamed(shapes, state, str(path)), state, str(path))
        with np.load(path, allow_pickle=False) as held:
            return {name: held[name] for name in held.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise BadInputError(f"{path} cannot be read as arrays of numbers ({first_line(error)})") from None


def in_order(arrays: Sequence[Any], names: Sequence[str], where: str) -> dict[str, Any]:
    """Return arrays by the names whose order they have.

    Raises:
        BadInputError: not as many.
    """
    if len(arrays) != len(names):
        raise BadInputError(
            f"{where}: {len(arrays)} arrays were given in order and the model sends {len(names)}; give them by name"
        )
    return dict(zip(names, arrays, strict=True))


def _numbered(arrays: Sequence[Any]) -> dict[str, Any]:
    """Return arrays in order by the names that NumPy gives them in a file."""
    return {f"arr_{number}": array for number, array in enumerate(arrays)}


def _renamed(items: Mapping[str, Any], state: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """Return items by the model's own names: of lists by their place, without what wrappers put before them."""
    if items and list(items) == list(_numbered(list(items))):
        return in_order(list(items.values()), list(state), where)
    found = dict(items)
    for wrapper in _WRAPPERS:
        if found and all(name.startswith(wrapper) for name in found):
            found = {name.removeprefix(wrapper): value for name, value in found.items()}
    return {name: value for name, value in found.items() if not name.endswith("position_ids") or name in state}


def _fit(shapes: Mapping[str, Sequence[int]], state: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights that are not the model's, by names and shapes alone."""
    surplus = sorted(set(shapes) - set(state))
    if surplus:
        raise BadInputError(
            f"{where} is of another model: {len(surplus)} of its weights are not in this one, as '{surplus[0]}'"
        )
    for name, shape in shapes.items():
        if tuple(shape) != tuple(state[name].shape):
            raise BadInputError(
                f"{where} is of another model: '{name}' is {list(shape)} there and {list(state[name].shape)} here"
            )
    # a tied weight is one tensor under several names, of which a file may hold one
    there = {state[name].data_ptr() for name in shapes}
    absent = sorted(name for name, value in state.items() if name not in shapes and value.data_ptr() not in there)
    if absent:
        raise BadInputError(f"{where} lacks {len(absent)} of the model's weights, the first is '{absent[0]}'")


def _named(items: Mapping[str, Any], state: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    found = _renamed(items, state, where)
    for name, value in found.items():
        if not isinstance(value, Tensor | np.ndarray | np.generic):
            raise BadInputError(f"{where}: '{name}' is no array of numbers but a {type(value).__name__}")
    _fit({name: tuple(value.shape) for name, value in found.items()}, state, where)
    out = {}
    for name, value in found.items():
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        out[name] = tensor.detach().to("cpu", torch.float32 if state[name].is_floating_point() else state[name].dtype)
        if not bool(torch.isfinite(out[name]).all()):
            raise BadInputError(f"{where}: '{name}' holds NaN or infinite values")
    first: dict[int, str] = {}  # of each tied weight the name that was given
    for name in out:
        first.setdefault(state[name].data_ptr(), name)
    whole = {name: out.get(name, out[first[value.data_ptr()]]) for name, value in state.items()}
    for name, value in state.items():
        if not torch.equal(whole[name], out[first[value.data_ptr()]]):
            tied = first[value.data_ptr()]
            raise BadInputError(f"{where}: '{name}' and '{tied}' are one tied weight of the model and differ there")
    return whole
