"""What an attack on text sets out to learn."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from gradaudit.learned.manifest import Target
from gradaudit.learned.public import Public, ReplaysText
from gradaudit.learned.text.features import sizes_of
from gradaudit.models.base import TextModel
from gradaudit.registry import hyper
from gradaudit.streams import draw_seed, stream


@dataclass(frozen=True)
class Plan:
    """What is learned, and how: the hyperparameters of an attack that learns from public text."""

    name: ClassVar[str]
    learner: Literal["network", "layers"] = hyper(
        "network",
        '"network" (the paper\'s, on bins drawn by chance) or "layers" (ours, one sentence: a linear guess at every '
        "position and the position table's own rows, read by one network for all positions)",
        later=True,
    )
    references: int = hyper(6000, '"layers": updates that the linear guess is fitted to', source="ours", later=True)
    inverter: str = hyper("", "folder of a fitted inverter; without one, 'run' and 'sweep' fit it from [public]")
    pseudo: bool = hyper(
        False, "train on words drawn from the public text's frequencies, fresh every batch (LTI-P)", source="LTI-P"
    )
    piece: float = hyper(
        1.0,
        "pseudo: words that are drawn together in the mean, as they stand in the public text; 1 draws each by itself",
        source="ours; the paper draws each by itself",
        later=True,
    )
    share: float = hyper(0.1, "bins as a share of the coordinates seen", source="section 4.1")
    signed: bool = hyper(False, "hash with random signs", source="the paper sums without")
    bottleneck: int = hyper(600, "width of the first hidden layer", source="section 4.1")
    width: int = hyper(1000, "width of each position's hidden vector", source="section 4.1")
    epochs: int = hyper(20, "passes over the public text, or as many drawn texts", source="section 4.1; its code: 100")
    batch: int = hyper(64, "updates a step", source="section 4.1")
    learning_rate: float = hyper(
        0.0, "Adam's; 0 tries 1e-3, 1e-4 and 1e-5 and takes the best on held-out public text", source="section 4.1"
    )
    trial: int = hyper(100, "steps that each learning rate is tried for", source="ours")
    pairs: bool = hyper(
        False,
        "weigh what is read by how often words stand side by side in the public text, and take the likeliest sentence",
        source="ours",
        later=True,
    )
    own_words: bool = hyper(
        False,
        "begin the shared layer with the model's own word and output vectors and the public text's frequencies",
        source="ours: rare words need not be learned one by one",
    )
    decay: bool = hyper(True, "let the learning rate fall to zero", source="ours; the paper keeps it")
    squared: bool = hyper(False, "mean squared error in place of cross-entropy", source="the paper's for images")
    validation: float = hyper(0.05, "share of the public text held out to choose by", source="ours")
    patience: int = hyper(5, "validations without a better one after which training stops; 0 never", source="ours")


@dataclass(frozen=True)
class Lesson:
    """What is learned from, for which update, and how.

    Args:
        simulation: replays the client on public text.
        public: all of it.
        shown, held_out: its parts that are learned from and chosen by.
        target: what the inverter is made for.
        model: the public model.
        plan: what is learned.
        folder: where a checkpoint is kept until it is done.
        seed: of hash, weights, order and simulation.
    """

    simulation: ReplaysText
    public: Public
    shown: Public
    held_out: Public
    target: Target
    model: TextModel
    plan: Plan
    folder: Path
    seed: int

    @property
    def bins(self) -> int:
        """Of the hash."""
        return max(1, round(self.plan.share * sum(sizes_of(self.target.tensors).values())))

    @property
    def hash_seed(self) -> int:
        """Of the hash, which goes with the inverter."""
        return draw_seed(stream(self.seed, "hash"))
