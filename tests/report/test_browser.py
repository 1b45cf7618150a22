"""The pages in a real browser: no errors, no network, nothing wider than the screen. Skipped without Chromium."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autopar.report.page import html_report
from autopar.report.plan_page import plan_report
from autopar.search.result.result import SearchResult

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed")
WIDTHS = (1400, 400)
# What a frame of a width tells of the page in it. The frame's own script runs under the page's policy.
PROBE = """<script>
addEventListener("load", () => {
  const buttons = [...document.querySelectorAll("button")];
  buttons.forEach((button) => { button.click(); if (button.hasAttribute("aria-pressed")) button.click(); });
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  document.querySelectorAll("[data-plot]").forEach((area) => {
    const box = area.getBoundingClientRect();
    for (const x of [0.1, 0.3, 0.5, 0.7]) {
      for (const y of [0.2, 0.5, 0.8]) {
        area.dispatchEvent(new PointerEvent("pointermove",
          { clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true }));
      }
    }
  });
  const clipped = [...document.querySelectorAll("body *")].filter((one) => {
    if (one.closest(".wide, nav, svg, #tip, details")) return false;
    const box = one.getBoundingClientRect();
    return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
  }).map((one) => `${one.tagName}.${one.className}: ${one.textContent.slice(0, 40)}`);
  parent.postMessage(JSON.stringify({
    page: location.pathname.split("/").pop(),
    width: innerWidth,
    scroll: document.documentElement.scrollWidth,
    clipped,
    tip: document.getElementById("tip").textContent,
    buttons: buttons.length,
  }), "*");
});
</script></body>"""
FRAMES = """<!DOCTYPE html><title>frames</title>
<script>
addEventListener("message", (event) => {
  const line = document.createElement("p");
  line.className = "found"; line.textContent = event.data;
  document.body.append(line);
});
</script><body>{frames}</body>"""


@dataclass(frozen=True)
class Looked:
    """What the browser wrote to its console, what pages asked the network for, and what the probe found by frame."""

    console: list[str]
    requested: list[str]
    frames: list[dict[str, Any]]


class _Found(HTMLParser):
    """The paragraphs that the probe's answers are put into."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag == "p" and ("class", "found") in attrs
        if self.inside:
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[-1] += data


def looked_at(folder: Path, pages: Mapping[str, str]) -> Looked:
    """Every page in a frame of every width, in one run of the browser."""
    frames = []
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(html.replace("</body>", PROBE), encoding="utf-8")
        frames += [f'<iframe src="{name}.html" width="{width}" height="900"></iframe>' for width in WIDTHS]
    (folder / "frames.html").write_text(FRAMES.replace("{frames}", "".join(frames)), encoding="utf-8")
    log = folder / "net.json"
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
        f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", f"--log-net-log={log}",
        "--enable-logging=stderr", "--v=0", "--window-size=1500,1000", "--virtual-time-budget=8000", "--dump-dom",
        (folder / "frames.html").as_uri(),
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"HOME": str(folder)})
    assert ran.returncode == 0, ran.stderr[-2000:]
    reader = _Found()
    reader.feed(ran.stdout)
    assert len(reader.texts) == len(frames), ran.stdout[-2000:]
    return Looked(
        console=[line for line in ran.stderr.splitlines() if "CONSOLE" in line],
        requested=requested(log),
        frames=[json.loads(text) for text in reader.texts],
    )


def requested(log: Path) -> list[str]:
    """Addresses that pages asked for over the network. The browser asks for things of its own, which no origin does."""
    text = log.read_text(errors="replace").rstrip()
    data = json.loads(text if text.endswith("}") else text.rstrip(",") + "]}")  # ended before it was closed
    asked = [event.get("params", {}) for event in data["events"]]
    by_pages = [one for one in asked if one.get("initiator", "not an origin") != "not an origin"]
    return sorted({str(one["url"]) for one in by_pages if str(one.get("url", "")).startswith(("http", "ws"))})


def test_pages_in_a_browser(tmp_path: Path, pipeline: SearchResult, flat: SearchResult, misfit: SearchResult) -> None:
    assert pipeline.plan is not None
    long = replace(flat, model="an-unusually-long-name-" * 6, cluster="<b>&" + "cluster" * 20)
    pages = {
        "pipeline": html_report(pipeline),
        "flat": html_report(long),
        "misfit": html_report(misfit),
        "plan": plan_report(pipeline.plan),
    }
    found = looked_at(tmp_path, pages)
    assert found.console == []
    assert found.requested == []
    for frame in found.frames:
        assert frame["scroll"] <= frame["width"], frame
        assert frame["clipped"] == [], frame
    assert {frame["width"] for frame in found.frames} == set(WIDTHS)
    tips = {frame["page"] for frame in found.frames if frame["tip"]}
    assert tips >= {"pipeline.html", "flat.html"}  # a pointer over a plot is told what is there


def test_the_probe_sees_what_is_wrong(tmp_path: Path) -> None:
    broken = """<!DOCTYPE html><body><div id="tip"></div><img src="http://example.invalid/x.png">
<div style="width:2000px">wide</div><script>throw new Error("planted");</script></body>"""
    found = looked_at(tmp_path, {"broken": broken})
    assert any("planted" in line for line in found.console)
    assert found.requested == ["http://example.invalid/x.png"]
    assert all(frame["scroll"] > frame["width"] and frame["clipped"] for frame in found.frames)
