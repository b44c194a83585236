"""What an attack must leave as it was: a module's mode, flags and hooks, and its weights."""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def remember(module: nn.Module) -> Callable[[], bool]:
    """Note a module's mode, flags and hooks; the returned function puts them back and says whether any had changed.

    Gradients that were left on the parameters are cleared, which is no change.
    """
    modules = list(module.modules())
    parameters = dict(module.named_parameters())
    mode = [m.training for m in modules]
    flags = {name: p.requires_grad for name, p in parameters.items()}
    hooks = [{kind: dict(getattr(m, kind)) for kind in _HOOKS} for m in modules]

    def restore() -> bool:
        now = dict(module.named_parameters())
        changed = now.keys() != parameters.keys() or any(p is not now[name] for name, p in parameters.items())
        for name, p in parameters.items():
            p.grad = None
            changed |= p.requires_grad != flags[name]
            p.requires_grad_(flags[name])
        for m, was, kinds in zip(modules, mode, hooks, strict=True):
            changed |= m.training != was
            m.training = was
            for kind, known in kinds.items():
                now = getattr(m, kind)
                changed |= list(now) != list(known)
                now.clear()
                now.update(known)
        return changed

    return restore


@torch.no_grad()
def fit_in(module: nn.Module, kind: str) -> None:
    """Round a module's weights to what fits in a type, "float32" or "bfloat16", and leave them in their own."""
    for p in module.parameters():
        p.copy_(p.to(getattr(torch, kind)))


def fingerprint_of(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 of weights by parameter name."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(_bytes(value))
    return digest.hexdigest()


def digest_of(value: Tensor) -> str:
    """Return the sha256 of a tensor's entries, in their order."""
    return hashlib.sha256(_bytes(value)).hexdigest()


def _bytes(value: Tensor) -> memoryview:
    return value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data
