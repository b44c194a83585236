"""The judge: the only place that sees the private batch and the reconstruction together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradaudit.metrics import text as metrics
from gradaudit.metrics.images import Scores
from gradaudit.metrics.rouge import has_bigram
from gradaudit.models.images import ImageModel
from gradaudit.models.transformers import TransformersModel
from gradaudit.record import Diagnosis, Spectrum
from gradaudit.types import Batch, Observation, Reconstruction


def modeled(attack: Any, defense: str, seen: Observation[Any], clients: int) -> bool:
    """Return whether an attack reckons with a defense that acted, as it acted.

    Args:
        attack: the attack that was run.
        defense: a name.
        seen: what it saw and was told.
        clients: how many defended their own updates before the server saw their mean.
    """
    told = seen.knowledge.defenses is not None or not attack.must_be_told(defense)
    alone = clients == 1 or attack.reckons_with_means(defense)
    return bool(told and alone and attack.reckons_with(defense, seen.model, seen.knowledge.batch_size))


def notes_of(found: Reconstruction | None, size: int) -> tuple[str, ...]:
    """Return an attack's notes, and how many guesses it made where the batch has fewer examples."""
    if found is None:
        return ()
    surplus = (f"{found.count} guesses for a batch of {size}: the nearest were scored",) if found.count > size else ()
    return (*found.notes, *surplus)


def read_as_gradient(attack: Any, seen: Observation[Any], made: Mapping[str, Any]) -> bool:
    """Return whether the weight change of several steps, or of several clients' steps, was read as one gradient's."""
    replayed = made["replayed"] and made["clients"] == 1  # what is replayed is one client with the whole batch
    return seen.kind == "delta" and made["steps"] > 1 and not (attack.exact_on_deltas or replayed)


def flags(
    *,
    model: TransformersModel,
    batch: Batch,
    seen: Observation,
    made: Mapping[str, Any],
    attack: Any,
    found: Reconstruction | None,
    scores: metrics.Scores,
    baseline: metrics.Scores,
    diagnosis: Diagnosis | None,
    shape: Spectrum | None,
) -> tuple[str, ...]:
    """Return the names of all flags that hold for one batch (see `gradaudit.flags`).

    Args:
        made: how the update was made ("dropout" rate, "defenses", local "steps", how many "clients" share it), and
            whether the attack "replayed" it.
        attack: the attack that was run.
        found: what it returned; None when it failed.
    """
    raised = {
        "random-weights": model.spec.random_weights,
        "surplus-guesses": found is not None and found.count > len(batch.ids),
        "truncated": batch.truncated > 0,
        "load-above-width": batch.tokens > model.width,
        "full-rank": shape is not None and shape.rank >= shape.width,
        "short-references": not all(has_bigram(model.decode(s)) for s in batch.sequences()),
        "dropout-not-modeled": made["dropout"] > 0 and not attack.models_dropout,
        "defense-not-modeled": not all(
            modeled(attack, str(d["name"]), seen, made["clients"]) for d in made["defenses"]
        ),
        "delta-as-gradient": read_as_gradient(attack, seen, made),
        "word-rows-shared": any(v.parameter in model.group("word") for v in seen.views.values()),
        "optimizer-failed": diagnosis is not None and diagnosis.verdict == "optimizer failed",
        "objective-failed": diagnosis is not None and diagnosis.verdict == "objective failed",
        "blind-not-beaten": attack.name != "blind" and (scores["rougeL"] or 0.0) <= (baseline["rougeL"] or 0.0),
    }
    return tuple(sorted(name for name, holds in raised.items() if holds))


def image_flags(
    *,
    model: ImageModel,
    seen: Observation[ImageModel],
    made: Mapping[str, Any],
    attack: Any,
    surplus: bool,
    scores: Scores,
    baseline: Scores,
    diagnosis: Diagnosis | None,
) -> tuple[str, ...]:
    """Return the names of all flags that hold for one batch of images (see `gradaudit.flags`).

    Args:
        made: how the update was made ("defenses", local "steps", "clients"), and whether the attack "replayed" it.
        attack: the attack that was run.
        surplus: it returned more images than the batch has.
    """
    raised = {
        "random-weights": model.spec.random_weights,
        "surplus-guesses": surplus,
        "defense-not-modeled": not all(
            modeled(attack, str(d["name"]), seen, made["clients"]) for d in made["defenses"]
        ),
        "delta-as-gradient": read_as_gradient(attack, seen, made),
        "optimizer-failed": diagnosis is not None and diagnosis.verdict == "optimizer failed",
        "objective-failed": diagnosis is not None and diagnosis.verdict == "objective failed",
        "blind-not-beaten": attack.name != "blind" and (scores["mse"] or 0.0) >= (baseline["mse"] or 0.0),
    }
    return tuple(sorted(name for name, holds in raised.items() if holds))
