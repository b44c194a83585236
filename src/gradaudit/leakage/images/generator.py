"""A small generator of images, learned from public ones: what an attacker takes private images to look like."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gradaudit.leakage.matching.descent import pull
from gradaudit.progress import track
from gradaudit.streams import global_stream, stream
from gradaudit.types import PublicImages
from gradaudit.workspace import learned

_FORM = 1
"""Counts up when the network or its training changes, so that what was kept is learned anew."""


@dataclass(frozen=True)
class GeneratorSpec:
    """How a generator is made.

    Args:
        latent: numbers an image is made from.
        channels: of its widest layer.
        steps: of training.
        batch: images a step.
        learning_rate: Adam's.
        divergence: weight of the divergence of latents from a normal distribution, beside the squared error.
    """

    latent: int = 64
    channels: int = 48
    steps: int = 2000
    batch: int = 64
    learning_rate: float = 1e-3
    divergence: float = 0.02


class Generator:
    """A generator as a pure function of latents and weights.

    Args:
        module: the network.
        weights: by parameter name.
    """

    def __init__(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._module, self.weights = module, dict(weights)

    def __call__(self, latents: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return images [..., C, H, W] in 0 to 1 of latents [..., d]."""
        used = dict(weights if weights is not None else self.weights)
        made: Tensor = functional_call(self._module, used, (latents.flatten(0, -2),))
        return made.view(*latents.shape[:-1], *made.shape[1:])


def generator_of(public: PublicImages, spec: GeneratorSpec, device: torch.device) -> Generator:
    """Return the generator that public images give; learned once a run's folder (`gradaudit.workspace`).

    Its random stream comes from the images and the spec alone: every batch of an audit gets the same generator.

    Args:
        public: the attacker's images.
        spec: network and training.
        device: where it goes.
    """
    text = repr((_FORM, public.sha256, tuple(public.images.shape[1:]), sorted(asdict(spec).items())))
    key = "generator-" + hashlib.sha256(text.encode()).hexdigest()[:24]
    channels, height, width = public.images.shape[1:]
    module = _Decoder(spec, channels, height, width)
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
    weights = learned(key, shapes, lambda: _train(public, spec, device, key))
    return Generator(module.to(device), {n: w.to(device) for n, w in weights.items()})


def _train(public: PublicImages, spec: GeneratorSpec, device: torch.device, key: str) -> dict[str, Tensor]:
    """Train a variational autoencoder and return its decoder's weights."""
    channels, height, width = public.images.shape[1:]
    with global_stream(stream(0, key, "weights"), torch.device("cpu")):
        encoder = _Encoder(spec, channels, height, width).to(device)
        decoder = _Decoder(spec, channels, height, width).to(device)
    rng = stream(0, key, "training")
    variables = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(variables, lr=spec.learning_rate)
    images = public.images.to(device)
    for step in track(range(spec.steps), "generator"):
        rows = torch.randint(len(images), (min(spec.batch, len(images)),), generator=rng)
        shown = images[rows]
        mean, spread = encoder(shown)
        noise = torch.randn(mean.shape, generator=rng).to(device)
        made = decoder(mean + noise * (0.5 * spread).exp())
        error = (made - shown).square().flatten(1).sum(1)
        divergence = 0.5 * (mean.square() + spread.exp() - spread - 1).sum(1)
        optimizer.param_groups[0]["lr"] = spec.learning_rate * (1 - step / spec.steps)
        pull((error + spec.divergence * divergence).mean(), variables)
        optimizer.step()
    return {n: p.detach() for n, p in decoder.named_parameters()}


def _quarters(height: int, width: int) -> tuple[int, int]:
    return (height + 3) // 4, (width + 3) // 4


class _Encoder(nn.Module):
    def __init__(self, spec: GeneratorSpec, channels: int, height: int, width: int) -> None:
        super().__init__()
        high, wide = _quarters(height, width)
        self.body = nn.Sequential(
            nn.Conv2d(channels, spec.channels // 2, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(spec.channels // 2, spec.channels, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(spec.channels * high * wide, 2 * spec.latent),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.body(images).chunk(2, 1)
        return mean, spread.clamp(-10, 10)


class _Decoder(nn.Module):
    def __init__(self, spec: GeneratorSpec, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.size, self.start = (height, width), (spec.channels, *_quarters(height, width))
        self.first = nn.Linear(spec.latent, spec.channels * self.start[1] * self.start[2])
        self.one = nn.Conv2d(spec.channels, spec.channels, 3, padding=1)
        self.two = nn.Conv2d(spec.channels, spec.channels // 2, 3, padding=1)
        self.last = nn.Conv2d(spec.channels // 2, channels, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        hidden = F.relu(self.first(latents)).view(-1, *self.start)
        hidden = F.relu(self.one(F.interpolate(hidden, scale_factor=2.0)))
        hidden = F.relu(self.two(F.interpolate(hidden, scale_factor=2.0)))
        images: Tensor = self.last(hidden)[..., : self.size[0], : self.size[1]].sigmoid()
        return images
