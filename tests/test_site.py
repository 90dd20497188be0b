"""The documentation site: it builds without a network or a warning, and no page is wider than a phone."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """<iframe id="page" style="height:900px;border:0"></iframe><pre id="faults"></pre><script>
const frame = document.getElementById("page"), faults = [];
(async () => {
  for (const width of [390, 1280]) for (const name of PAGES) {
    frame.style.width = width + "px";
    await new Promise((done) => { frame.onload = done; frame.src = name; });
    await new Promise((done) => setTimeout(done, 30));
    const shown = frame.contentDocument, missing = [...shown.images].filter((one) => one.complete && !one.naturalWidth);
    if (shown.documentElement.scrollWidth > width) faults.push(`${name} is wider than ${width}`);
    faults.push(...missing.map((one) => `${name} lacks ${one.getAttribute("src")}`));
  }
  document.getElementById("faults").textContent = JSON.stringify(faults);
})();
</script>"""


def build(html: Path, *options: str) -> None:
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", *options]
    command += ["-d", str(html.with_name("doctrees")), "docs", str(html)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_every_page_is_read_without_a_warning(tmp_path: Path) -> None:
    """Sphinx reads all pages and docstrings and resolves links; it writes nothing and draws no picture."""
    pytest.importorskip("sphinx")
    build(tmp_path / "nothing", "-b", "dummy", "--tag", "text")


@pytest.mark.nightly
def test_the_site_builds_and_fits_phones(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    build(tmp_path / "html")
    if BROWSER is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    pages = [os.path.relpath(path, tmp_path / "html") for path in (tmp_path / "html").rglob("*.html")]
    pages.remove("report.html")  # tests/report/test_browser.py looks at it
    (tmp_path / "html/probe.html").write_text(PROBE.replace("PAGES", json.dumps(pages)), encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=60000", "--dump-dom"]
    shown = subprocess.run(
        [BROWSER, *options, (tmp_path / "html/probe.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    faults = re.search(r'<pre id="faults">(.*?)</pre>', shown.stdout, re.DOTALL)
    assert faults
    assert json.loads(faults[1]) == []
