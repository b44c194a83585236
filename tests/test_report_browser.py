"""The report in a real browser: it draws, fits a phone and a desktop, and shows hostile words as text."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from gradaudit.report.render import render_html
from made_reports import make_info, make_run, make_summaries

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
REQUIRED = os.environ.get("GRADAUDIT_REQUIRE_BROWSER") == "1"

Browse = Callable[..., str]

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not REQUIRED,
    reason="no chromium here (apt-get install chromium); GRADAUDIT_REQUIRE_BROWSER=1 insists on it",
)


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Return a function that runs Chromium once on a page and returns what it prints."""
    assert CHROMIUM is not None, "GRADAUDIT_REQUIRE_BROWSER=1 is set, but there is no chromium to be found"

    def run(page: Path, *options: str, width: int = 1280, height: int = 900) -> str:
        command = [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},{height}",
            *options,
            page.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.fixture(params=[False, True], ids=["hidden", "shown"])
def report(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a report with everything in it, with the words hidden or shown."""
    records, texts = make_run()
    path = tmp_path / "report.html"
    html = render_html(make_info(), records, texts, make_summaries(records), show_text=request.param)
    path.write_text(html, encoding="utf8")
    return path


@pytest.mark.parametrize(
    ("report", "width", "dark"),
    [(True, 390, False), (False, 1280, False), (True, 1280, True)],
    ids=["phone", "light", "dark"],
    indirect=["report"],
)
def test_report_is_drawn(browse: Browse, report: Path, tmp_path: Path, width: int, dark: bool) -> None:
    """To look at the pictures: `pytest --basetemp FOLDER` keeps them there."""
    picture = tmp_path / "picture.png"
    scheme = ("--blink-settings=preferredColorScheme=0",) if dark else ()
    browse(report, f"--screenshot={picture}", *scheme, width=width, height=844)
    seen_width, colors, paper = _read_png(picture.read_bytes())
    assert seen_width >= width
    assert max(paper) < 64 if dark else min(paper) > 192
    assert colors > 50, "the picture is blank, or nearly"


@pytest.mark.parametrize("unfolded", [False, True])
def test_nothing_overflows_and_a_desktop_shows_whole_tables(
    browse: Browse, report: Path, tmp_path: Path, unfolded: bool
) -> None:
    # The report may run no script, so a page around it measures it; unfolding takes a copy with `open` set.
    if unfolded:
        opened = report.read_text(encoding="utf8").replace("<details", "<details open")
        report.write_text(opened, encoding="utf8")
    frames = "".join(_FRAME % {"page": report.name, "width": width} for width in _WIDTHS)
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(_WRAPPER % frames, encoding="utf8")
    told = browse(wrapper, "--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom")
    found = re.findall(r"measured (\d+) (\d+) wide:\[(.*?)\] cut (\d+) beside (true|false)", told)
    assert len(found) == len(_WIDTHS), told[-1500:]
    for width, (scroll, client, wide, cut, beside) in zip(_WIDTHS, found, strict=True):
        assert int(client) == width
        assert int(scroll) <= width, f"page is {scroll} wide in a window of {client}: {wide}"
        assert not wide, f"these reach past the edge of {width}: {wide}"
        if width == _DESKTOP:
            assert cut == "0", "pixels of the scores' table that are cut off"
            assert beside == "true", "the sentence stands beside the verdict"


def test_hostile_words_stay_text(browse: Browse, report: Path) -> None:
    dom = browse(report, "--dump-dom")
    assert "<script" not in dom.lower()
    assert "onmouseover=" not in re.sub(r">[^<]*<", "><", dom)
    shown = "&lt;script&gt;alert(1)&lt;/script&gt;" in dom
    assert shown == ("This page shows private text" in dom)


@pytest.mark.parametrize("report", [True], indirect=True)
def test_the_page_is_policed_against_scripts(browse: Browse, report: Path, tmp_path: Path) -> None:
    html = report.read_text(encoding="utf8")
    smuggled = tmp_path / "smuggled.html"
    smuggled.write_text(html.replace("</main>", "<script>document.title='ran'</script></main>"), encoding="utf8")
    assert "<title>ran</title>" not in browse(smuggled, "--dump-dom")


_DESKTOP = 1180
_WIDTHS = (320, 360, 768, _DESKTOP, 1280)
_FRAME = '<p></p><iframe src="%(page)s" style="border:0;width:%(width)dpx;height:900px"></iframe>'
_WRAPPER = """<!doctype html><meta charset="utf-8"><body style="margin:0">
<script>
document.addEventListener("load", (event) => {
  const inside = event.target.contentDocument, root = inside.documentElement;
  const wide = [...inside.querySelectorAll("body *")].filter((node) =>
    !node.closest(".scroll *, .vh, svg *") && node.getBoundingClientRect().right > root.clientWidth + 1);
  const scores = inside.querySelector(".scroll:has(> .results)"), cut = scores.scrollWidth - scores.clientWidth;
  const [said, shown] = [".verdict .sentence", ".verdict .evidence"].map((one) => inside.querySelector(one));
  const beside = shown.getBoundingClientRect().left > said.getBoundingClientRect().right;
  const names = wide.slice(0, 8).map((node) => node.tagName + "." + node.className).join(" ");
  event.target.previousElementSibling.textContent =
    `measured ${root.scrollWidth} ${root.clientWidth} wide:[${names}]` + ` cut ${cut} beside ${beside}`;
}, true);
</script>
%s
"""


_EVERY = 8
"""Every so many rows of a picture are looked at."""


def _read_png(data: bytes) -> tuple[int, int, tuple[int, ...]]:
    """Return the width of a PNG of 8-bit samples, how many distinct pixels some rows have, and its first pixel.

    Nothing comes before the first pixel, so that it is itself whatever the filter.
    """
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, body, width, samples = 8, b"", 0, 3
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, chunk = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, _, depth, color = struct.unpack(">IIBB", chunk[:10])
            assert depth == 8
            samples = {2: 3, 6: 4}[color]
        elif kind == b"IDAT":
            body += chunk
        at += 12 + length
    raw = zlib.decompress(body)
    stride = 1 + width * samples
    pixels = {
        raw[row + 1 + i : row + 1 + i + samples]
        for row in range(0, len(raw), _EVERY * stride)
        for i in range(0, stride - 1, samples)
    }
    return width, len(pixels), tuple(raw[1:4])
