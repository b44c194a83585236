"""The frontier: the strongest attack counts, what is dominated is marked, and what is recommended has its reason."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gradaudit.case import parse_case
from gradaudit.record import Interval, Record, SentenceMarks, Summary
from gradaudit.report.frontier_page import _LEFT, frontier_svg, write_frontiers
from gradaudit.scores import SCORES
from gradaudit.sweeps.frontier import frontiers
from gradaudit.sweeps.result import Result, SweepPoint
from gradaudit.sweeps.utility import Utility

TEXT_SCORES = SCORES["text"].names


def interval(mean: float) -> Interval:
    return Interval(mean=mean, low=mean - 1, high=mean + 1, worst=mean, n=4)


def result(
    sigma: float | None, leak: float, mcc: float, attack: str = "dager", size: int = 1, flags: tuple[str, ...] = (),
    failed: int = 0, epsilon: float | None = None, exact: float = 0.0,
    unsupported: bool = False, high: float | None = None, sentences: tuple[SentenceMarks, ...] = (), **over: Any,
) -> Result:  # fmt: skip
    defense = [] if sigma is None else [{"name": "gaussian", "sigma": sigma}]
    case = parse_case({"attack": {"name": attack}, "defense": defense, "data": {"batch_size": size}} | over)
    words = "none" if sigma is None else f"gaussian sigma={sigma}"
    told = Interval(mean=leak, low=leak - 1, high=leak + 1 if high is None else high, worst=leak, n=4)
    scores = dict.fromkeys(TEXT_SCORES, told) | {"exact": interval(exact)}
    blind = {n: interval(10.0) for n in TEXT_SCORES} | {"exact": interval(0.0)}
    summary = Summary(
        case="c",
        setting="s",
        attack=attack,
        n=4,
        failed=failed,
        scores=scores,
        baseline=blind,
        seconds=1.0,
        flags=flags,
    )
    cost = Utility(80.0, 80.0, mcc, mcc - 5.0, mcc + 5.0, 50.0, 100, 50, epsilon, 1e-3, 16, 1.0)
    record = Record(
        case="c", setting="s", batch=0, attack=attack, scores={"rougeL": leak, "exact": exact},
        baseline={"rougeL": 10.0, "exact": 0.0}, batch_size=size, seconds=1.0, unsupported=unsupported,
        error="broken" if failed else None, sentences=sentences,
    )  # fmt: skip
    return Result(SweepPoint({"defense": words, "attack": attack}, case), summary, (record,), utility=cost)


def test_several_attacks_on_one_client_count_by_the_strongest():
    (found,) = frontiers([result(None, 40, 70), result(None, 90, 70, "decode"), result(None, 60, 70, "tag")])
    (point,) = found.points
    assert (point.attack, point.leak.mean, point.client) == ("decode", 90, "none")


def test_what_is_no_better_in_anything_is_dominated():
    (found,) = frontiers(
        [result(None, 90, 70), result(1e-4, 90, 60), result(1e-3, 40, 50), result(1e-2, 45, 50), result(0.1, 5, 20)]
    )
    assert {p.client: p.dominated for p in found.points} == {
        "none": False, "gaussian sigma=0.0001": True, "gaussian sigma=0.001": False,
        "gaussian sigma=0.01": True, "gaussian sigma=0.1": False,
    }  # fmt: skip
    assert [p.utility.mcc for p in found.points] == [70, 60, 50, 50, 20]


def test_equal_points_do_not_dominate_each_other():
    (found,) = frontiers([result(None, 90, 70), result(1e-4, 90, 70)])
    assert not any(p.dominated for p in found.points)


def test_of_what_tells_no_more_than_blind_the_most_useful_is_taken():
    (found,) = frontiers([result(None, 90, 70), result(1e-3, 13.9, 50), result(1e-2, 9, 40), result(1e-1, 14.1, 60)])
    assert found.chosen is not None
    assert found.chosen.client == "gaussian sigma=0.001"
    assert "MCC 50.0" in found.reason
    assert "no formal guarantee" in found.reason


def test_where_nothing_stops_the_attacks_nothing_is_recommended():
    (found,) = frontiers([result(None, 90, 70), result(1e-3, 30, 50)])
    assert found.chosen is None
    assert "No setting blocks every attack" in found.reason
    assert "30.0 ROUGE-L by 'dager'" in found.reason


def test_what_stops_the_attacks_and_learns_nothing_is_not_recommended():
    (found,) = frontiers([result(None, 90, 70), result(10.0, 5, 3)])
    assert found.chosen is None
    assert "No setting is both private and useful" in found.reason


def test_a_lower_bound_is_recommended_last_and_said_to_be_one():
    bound = ("defense-not-modeled",)
    (found,) = frontiers([result(1e-3, 5, 60, flags=bound), result(1e-2, 5, 50)])
    assert found.chosen is not None
    assert found.chosen.client == "gaussian sigma=0.01"
    (alone,) = frontiers([result(1e-3, 5, 60, flags=bound)])
    assert alone.chosen is not None
    assert alone.chosen.bound
    assert "lower bound" in alone.reason
    (weak_knows,) = frontiers([result(1e-3, 5, 60, flags=bound), result(1e-3, 4, 60, "decode")])
    assert weak_knows.points[0].bound, "a weak attack that knows does not speak for a strong one that does not"
    (dropout,) = frontiers([result(1e-3, 5, 60, flags=("dropout-not-modeled",))])
    assert dropout.points[0].bound
    (blind,) = frontiers([result(1e-3, 5, 60, flags=bound), result(1e-3, 4, 60, "blind")])
    assert blind.points[0].bound


def test_a_formal_guarantee_is_not_denied():
    (found,) = frontiers([result(1e-3, 5, 60, epsilon=3.0)])
    assert "no formal guarantee" not in found.reason


def test_batch_sizes_have_frontiers_of_their_own_and_what_failed_is_said():
    small, large = frontiers(
        [result(None, 90, 70), result(None, 20, 70, size=8), result(1e-3, 0, 60, size=8, failed=4)]
    )
    assert (small.batch_size, large.batch_size) == (1, 8)
    assert [p.leak.mean for p in large.points] == [20], "an attack that failed everywhere is no sign of safety"
    assert large.missing == ("gaussian sigma=0.001, dager: broken",)


def test_an_attack_that_failed_does_not_count_beside_one_that_ran():
    (found,) = frontiers([result(1e-3, 0, 60, failed=4), result(1e-3, 80, 60, "decode")])
    assert found.points[0].leak.mean == 80
    assert found.missing == ("gaussian sigma=0.001, dager: broken",)


def test_failed_batches_make_the_leak_a_lower_bound_and_are_said():
    (found,) = frontiers([result(1e-3, 5, 60, failed=3)])
    assert found.points[0].bound
    assert found.missing == ("gaussian sigma=0.001, dager: 3 of 4 batches failed and count 0",)
    (other,) = frontiers([result(1e-3, 0, 60, "decode", failed=4), result(1e-3, 5, 60, "tag")])
    assert other.points[0].bound, "the attack that failed might have told more"


def test_a_sentence_that_is_read_exactly_is_no_silence():
    (found,) = frontiers([result(1e-3, 12, 60, exact=3.1)])
    assert found.chosen is None


def test_every_attack_must_be_silent_not_only_the_one_with_the_highest_mean():
    loud = result(1e-3, 11.5, 60, "decode", high=23)
    (found,) = frontiers([result(1e-3, 12, 60), loud])
    assert found.points[0].attack == "dager"
    assert not found.points[0].silent
    assert found.chosen is None
    (alone,) = frontiers([result(1e-3, 12, 60)])
    assert alone.chosen is not None


def test_what_the_report_finds_leaking_is_not_recommended():
    words = tuple("the cat sat on the mat".split())
    marks: Any = ("right",) * len(words)
    near = SentenceMarks(recovered=marks, original=marks, certificate=None, rougeL=95.0, exact=False)
    (found,) = frontiers([result(1e-3, 12, 60, sentences=(near,))])
    assert found.chosen is None
    (quiet,) = frontiers([result(1e-3, 12, 60, sentences=(near.model_copy(update={"rougeL": 30.0}),))])
    assert quiet.chosen is not None


def test_what_learns_nothing_is_recommended_to_nobody():
    (found,) = frontiers([result(1e-3, 5, 0), result(None, 90, 0)])
    assert found.chosen is None


def test_other_models_and_seeds_are_other_points():
    results = [result(None, 90, 70), result(None, 20, 70, layers=1), result(None, 30, 70, seed=1)]
    (found,) = frontiers(results)
    assert len(found.points) == 3
    knows = [result(None, 90, 70), result(None, 95, 70, knowledge={"labels": True})]
    assert [p.leak.mean for p in frontiers(knows)[0].points] == [95]


def test_the_drawing_has_every_point_where_it_belongs():
    (found,) = frontiers([result(None, 90, 80), result(1e-3, 50, 40), result(1e-2, 5, 30)])
    root = ElementTree.fromstring(str(frontier_svg(found)))
    signs = [g for g in root.iter("g") if g.get("class") == "point"]
    circles = [tuple(map(float, g.get("transform", "")[len("translate(") : -1].split())) for g in signs]
    assert len(circles) == 3
    assert circles[0][0] > circles[1][0] > circles[2][0], "the more useful further to the right"
    assert circles[0][1] < circles[1][1] < circles[2][1], "the leakier further up"
    assert len([c for c in root.iter("circle") if c.get("r") == "9"]) == 1


def test_families_of_defenses_have_shapes_and_colors_and_only_the_front_has_numbers():
    found = frontiers([result(None, 90, 80), result(1e-3, 50, 40), result(1e-2, 60, 30)])[0]
    assert [point.family for point in found.points] == ["no defense", "gaussian", "gaussian"]
    root = ElementTree.fromstring(str(frontier_svg(found)))
    signs = [g for g in root.iter("g") if g.get("class") == "point"]
    looks = [(g.find("path").get("d"), g.find("path").get("fill")) for g in signs]
    assert looks[0][0] != looks[1][0]
    assert looks[0][1] != looks[1][1]
    assert looks[1] == looks[2]
    assert signs[2].find("path").get("fill-opacity") == "0", "dominated"
    texts = [text.text for text in root.iter("text")]
    assert {"1", "2"} <= set(texts)
    assert "3" not in texts, "under the pointer alone"
    assert signs[2].find("title").text.startswith("3: ")
    assert {"no defense", "gaussian"} <= set(texts)
    (zone,) = [r for r in root.iter("rect") if r.get("class") == "zone"]
    assert float(zone.get("width")) > 0


def test_the_axis_of_utility_begins_at_0():
    (found,) = frontiers([result(None, 90, -8)])
    (sign,) = [g for g in ElementTree.fromstring(str(frontier_svg(found))).iter("g") if g.get("class") == "point"]
    assert sign.get("transform", "").startswith(f"translate({_LEFT:.1f} ")


def test_the_page_escapes_what_it_shows_and_says_what_is_recommended(tmp_path: Path):
    shown = result(1e-3, 5, 60)
    evil = Result(SweepPoint({"defense": "<script>x</script>"}, shown.point.case), shown.summary, utility=shown.utility)
    found = frontiers([evil, result(None, 90, 70)])
    page = write_frontiers(tmp_path, found, "<b>title")
    text = page.read_text(encoding="utf8")
    assert "<script" not in text
    assert "<b>title" not in text
    assert "recommended" in text
    assert re.search(r"default-src 'none'", text)
    ElementTree.parse(tmp_path / "frontier-1.svg")


def test_an_empty_point_list_says_so(tmp_path: Path):
    (found,) = frontiers([result(1e-3, 0, 60, failed=4)])
    assert found.points == ()
    assert found.reason == "Nothing was measured here."
    ElementTree.fromstring(str(frontier_svg(found)))
    assert "Not measured" in write_frontiers(tmp_path, [found], "t").read_text()


@pytest.mark.parametrize("mcc", [-20.0, 0.0])
def test_a_model_worse_than_chance_stays_on_the_drawing(mcc: float):
    (found,) = frontiers([result(None, 90, mcc)])
    root = ElementTree.fromstring(str(frontier_svg(found)))
    signs = (g.get("transform", "") for g in root.iter("g") if g.get("class") == "point")
    (x,) = (float(at.removeprefix("translate(").split()[0]) for at in signs)
    assert 50 <= x <= 545


def test_an_attack_that_is_not_supported_is_said_and_makes_no_lower_bound():
    refused = replace(result(1e-3, 0, 50, "tag"), summary=None, error="no counter", records=(), refused=True)
    (found,) = frontiers([result(None, 90, 70), result(1e-3, 12, 50, "decode"), refused])
    point = next(p for p in found.points if p.client != "none")
    assert (point.attack, point.bound, point.unsupported) == ("decode", False, ("tag",))
    assert found.missing == ("gaussian sigma=0.001, tag: not supported",)
    assert found.chosen == point


def test_what_no_attack_supports_is_no_point():
    gone = result(1e-3, 0, 50, "decode", failed=4, unsupported=True)
    (found,) = frontiers([result(None, 90, 70), gone])
    assert [p.client for p in found.points] == ["none"]
    assert found.missing == ("gaussian sigma=0.001, decode: not supported",)
