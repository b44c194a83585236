"""Where each parameter's gradient comes from: what its module read and wrote, sentence by sentence.

The gradient of a linear layer's weight is a sum of outer products of rows it read and of slopes at rows it wrote. Kept
as these factors, the gradient of one sentence among many costs no pass of its own, and nothing of the weight's size has
to live in the graph when the gradient is differentiated again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Dropout = Callable[[int, Tensor, float], Tensor]
"""What happens at a dropout site: (number of the site in the order of the forward pass, its input, its rate)."""


@dataclass(frozen=True)
class Tap:
    """One parameter's place in a forward pass over n sentences.

    Args:
        how: "matrix" [out, in]: sum of outer products written x read; "transposed": the same stored [in, out];
            "shift" [out]: sum of what was written; "scale" [out]: sum of written * read; "lookup" [V, out]: rows by id.
        read: [n, T, in] rows (normalized ones for a scale), or [n, T] ids of a lookup, -1 for none; empty for a shift.
        written: [n, ..., out] the module's output, in the graph of the losses; its rows are those of `read`.
    """

    how: Literal["matrix", "transposed", "shift", "scale", "lookup"]
    read: Tensor
    written: Tensor


@dataclass(frozen=True)
class Traced:
    """A forward pass with its taps.

    Args:
        losses: [n] loss of each sentence.
        taps: by parameter name, one for each use; a parameter with a use of another kind has none.
    """

    losses: Tensor
    taps: dict[str, list[Tap]]


@contextmanager
def tapped(module: nn.Module, wanted: Sequence[str], count: int) -> Iterator[dict[str, list[Tap]]]:
    """Collect the taps of the wanted parameters while the module runs.

    Args:
        module: the model.
        wanted: parameter names.
        count: sentences in the pass; a module whose rows do not belong to single sentences has no tap.
    """
    found: dict[str, list[Tap]] = {}
    lost: set[str] = set()
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False) if name in set(wanted)}
    hooks = []

    def watch(owner: nn.Module) -> None:
        mine = {part: names[id(p)] for part, p in owner.named_parameters(recurse=False) if id(p) in names}
        if not mine:
            return

        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            for part, name in mine.items():
                tap = _tap(owner, part, inputs[0], output, count)
                before = found.setdefault(name, [])
                if tap is None or name in lost or any(one.how != tap.how for one in before):
                    lost.add(name)
                    del found[name]
                else:
                    before.append(tap)

        hooks.append(owner.register_forward_hook(hook))

    for owner in module.modules():
        watch(owner)
    try:
        yield found
    finally:
        for handle in hooks:
            handle.remove()


def _tap(owner: nn.Module, part: str, read: Any, written: Any, count: int) -> Tap | None:
    if not isinstance(written, Tensor) or len(written) != count:
        return None
    kind = type(owner).__name__
    if isinstance(owner, nn.Embedding):
        # the padding's row of the gradient stays zero, whatever was written
        ids = read if owner.padding_idx is None else read.masked_fill(read == owner.padding_idx, -1)
        return Tap("lookup", ids.expand(count, -1), written)
    if part == "bias":
        return Tap("shift", written.new_zeros(0), written)
    before = read.flatten(1, -2) if read.dim() > 2 else read[:, None]
    if isinstance(owner, nn.Linear):
        return Tap("matrix", before, written)
    if kind == "Conv1D":  # GPT-2's linear layer
        return Tap("transposed", before, written)
    if isinstance(owner, nn.LayerNorm):
        return Tap("scale", F.layer_norm(before, owner.normalized_shape, eps=owner.eps), written)
    if kind.endswith("RMSNorm"):
        eps = float(getattr(owner, "variance_epsilon", getattr(owner, "eps", 1e-6)))
        return Tap("scale", before * torch.rsqrt(before.square().mean(-1, keepdim=True) + eps), written)
    return None


class DropoutSites(TorchFunctionMode):
    """Replaces every dropout of a forward pass, wherever the library calls it.

    Args:
        act: takes the place of the random draw. Called for places that drop anything, in their order.
    """

    def __init__(self, act: Dropout) -> None:
        super().__init__()
        self._act = act
        self._site = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is not F.dropout:
            return func(*args, **given)
        rate = float(args[1] if len(args) > 1 else given.get("p", 0.5))
        training = bool(args[2] if len(args) > 2 else given.get("training", True))
        inner = args[0] if args else given["input"]
        if rate == 0 or not training:
            return inner
        site, self._site = self._site, self._site + 1
        return self._act(site, inner, rate)
