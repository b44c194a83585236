"""When an evaluation cannot be trusted as it stands."""

from collections.abc import Mapping
from typing import Any

from gradaudit.record import Diagnosis
from gradaudit.scores import scores_of
from gradaudit.types import Observation, Reconstruction


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


def flags(
    *,
    own: Mapping[str, bool],
    seen: Observation[Any],
    made: Mapping[str, Any],
    attack: Any,
    surplus: bool,
    scores: Mapping[str, float | None],
    baseline: Mapping[str, float | None],
    diagnosis: Diagnosis | None,
) -> tuple[str, ...]:
    """Return the names of all flags that hold for one batch (see `gradaudit.flags`).

    Args:
        own: those that only this kind of data has (see `Judge.flags`).
        seen: what the attack saw.
        made: how the update was made ("dropout" rate, "defenses", local "steps", how many "clients" share it), and
            whether the attack "replayed" it.
        attack: the attack that was run.
        surplus: it returned more examples than the batch has.
        scores, baseline: of the attack and of the blind guess.
        diagnosis: which of the two failed; None where nobody looked.
    """
    kind = scores_of(scores)
    told, blind = (kind.strength(found[kind.main]) for found in (scores, baseline))
    replayed = made["replayed"] and made["clients"] == 1  # what is replayed is one client with the whole batch
    raised = {
        **own,
        "random-weights": seen.model.spec.random_weights,
        "surplus-guesses": surplus,
        "dropout-not-modeled": made["dropout"] > 0 and (made["replayed"] or not attack.models_dropout),
        "defense-not-modeled": not all(
            modeled(attack, str(d["name"]), seen, made["clients"]) for d in made["defenses"]
        ),
        "delta-as-gradient": seen.kind == "delta" and made["steps"] > 1 and not (attack.exact_on_deltas or replayed),
        "optimizer-failed": diagnosis is not None and diagnosis.verdict == "optimizer failed",
        "objective-failed": diagnosis is not None and diagnosis.verdict == "objective failed",
        "blind-not-beaten": attack.name != "blind" and told <= blind,
    }
    return tuple(sorted(name for name, holds in raised.items() if holds))
