"""The page in a real browser: it renders, logs no error, follows the theme, and its tables sort."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from tasks.report import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--enable-logging=stderr",
    "--window-size=1200,900",
)
# Runs after the page's own script; what it finds is read from the dumped page.
PROBE = """
const say = {};
const table = document.querySelector("#results table");
const column = (index) => [...table.tBodies[0].rows].map((row) => row.cells[index].dataset.order);
const heading = (index) => table.tHead.rows[0].cells[index];
const click = (index) => { heading(index).querySelector("button").click(); };
const last = table.tHead.rows[0].cells.length - 1;
say.before = column(0);
click(last); say.descending = column(last).map(Number); say.first = heading(last).getAttribute("aria-sort");
click(last); say.ascending = column(last).map(Number); say.second = heading(last).getAttribute("aria-sort");
click(0); say.names = column(0); say.sorted = document.querySelectorAll("#results th[aria-sort]").length;
say.tables = [...document.querySelectorAll("table")].map((one) => {
  one.tHead.rows[0].cells[0].querySelector("button").click();
  const orders = [...one.tBodies[0].rows].map((row) => row.cells[0].dataset.order);
  const ascending = one.tHead.rows[0].cells[0].getAttribute("aria-sort") === "ascending";
  const numeric = one.tHead.rows[0].cells[0].classList.contains("number");
  const compare = numeric ? (a, b) => a - b : (a, b) => a.localeCompare(b, "en", { numeric: true });
  return orders.every((order, i) => i === 0 || compare(orders[i - 1], order) * (ascending ? 1 : -1) <= 0);
});
const lineage = document.querySelector("#figure-lineage svg");
say.boxes = lineage.querySelectorAll("[id*=box-]").length;
const right = (text) => text.getBBox().x + text.getBBox().width;
say.spilt = [...lineage.querySelectorAll("text")].filter((text) => right(text) > lineage.viewBox.baseVal.width);
say.spilt = say.spilt.map((text) => text.textContent);
const drawing = document.querySelector("#figure-accuracy svg");
say.drawing = [drawing.getBoundingClientRect().width, drawing.getBoundingClientRect().height];
say.overflow = document.documentElement.scrollWidth - window.innerWidth;
say.background = getComputedStyle(document.body).backgroundColor;
say.ink = getComputedStyle(drawing.querySelector("text")).fill;
say.errors = window.errors;
document.body.dataset.probe = JSON.stringify(say);
"""
LISTEN = 'window.errors=[];addEventListener("error",(e)=>errors.push(e.message));'
LISTEN += 'addEventListener("securitypolicyviolation",(e)=>errors.push(e.violatedDirective+" "+e.blockedURI));'

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")


@pytest.fixture
def probed(finished, tmp_path):
    """A finished run's page with the probe in it."""
    page = write_report(finished, finished / "outputs/report.html").read_text(encoding="utf-8")
    page = page.replace("<head>", f"<head><script>{LISTEN}</script>").replace(
        "</body>", f"<script>{PROBE}</script></body>"
    )
    target = tmp_path / "probed.html"
    target.write_text(page, encoding="utf-8")
    return target


def look(page, *options):
    """Open the page; return what the probe found and what the browser logged for the page."""
    command = [BROWSER, *OPTIONS, f"--user-data-dir={page.parent / 'profile'}", *options, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    probe = re.search('data-probe="([^"]*)"', done.stdout)
    assert probe, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(unescape(probe[1])), console


@pytest.mark.slow
def test_it_renders_and_sorts_without_an_error(probed):
    facts, console = look(probed)
    assert facts["errors"] == []
    assert console == []
    assert facts["descending"] == sorted(facts["descending"], reverse=True)
    assert facts["ascending"] == facts["descending"][::-1]
    assert (facts["first"], facts["second"]) == ("descending", "ascending")
    assert facts["names"] == sorted(facts["before"]) != facts["before"]
    assert facts["sorted"] == 1
    assert len(facts["tables"]) >= 7
    assert all(facts["tables"])
    assert facts["boxes"] == 8 + 8 + 1 + 1 + 1  # data, experts, base, merge, version
    assert facts["spilt"] == []
    assert min(facts["drawing"]) > 200
    assert facts["overflow"] <= 0


@pytest.mark.slow
def test_light_and_dark_follow_the_reader(probed):
    light, _ = look(probed)
    dark, _ = look(probed, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
    assert (light["background"], light["ink"]) == ("rgb(255, 255, 255)", "rgb(90, 98, 112)")
    assert (dark["background"], dark["ink"]) == ("rgb(22, 26, 33)", "rgb(162, 171, 185)")


def test_a_narrow_screen_does_not_scroll_sideways(probed):
    facts, _ = look(probed, "--window-size=500,800")
    assert facts["overflow"] <= 0
