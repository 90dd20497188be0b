"""Sphinx's configuration. `make site` writes the reference and the gallery from the code, then builds all pages.

With `--tag text` no picture is drawn, which takes most of the time: so each change is checked (tests/test_site.py).
"""

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

from mergeflow.version import version as installed_version  # noqa: E402

project = "mergeflow"
author = "The mergeflow maintainers"
version = release = installed_version()
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["research/studies"]
source_suffix = {".md": "markdown"}
default_role = "code"
highlight_language = "none"
myst_heading_anchors = 4
autodoc_typehints = "none"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "mergeflow"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["reference/files"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False


def write_generated(app: Any, config: Any) -> None:
    """Write the pages and pictures that are made from the code; none of them is tracked."""
    from pages_of_code import write_reference

    write_reference(DOCS / "reference", pictures="text" not in app.tags)


def without_links_to_files(app: Any, name: str, source: list[str]) -> None:
    """Show links to files outside of the pages as their text, because the site does not hold these files."""
    up = r"\.\./" * (name.count("/") + 1)
    source[0] = re.sub(rf"\[([^\]]+)\]\({up}[^)]*\)", r"\1", source[0])


_REFERENCE = ("commands", "methods", "architectures", "parameters", "api", "gallery")
_README = """```{{include}} ../README.md
:start-after: "{start}"
:end-before: "{end}"
:relative-docs: docs/
:relative-images:
```
"""


def with_contents(app: Any, name: str, source: list[str]) -> None:
    """Put README into the first page, and the pages of its table into the site's contents.

    In the repository, where directives are shown as they are, the page has links alone.
    """
    if name != "index":
        return
    rows = re.findall(r"^\| (.+?) \| (\[.*) \|$", source[0], re.MULTILINE)
    parts = {part: re.findall(r"\[(.+?)\]\((.+?)\.md\)", links) for part, links in rows}
    parts["Reference"] = [("", f"reference/{page}") for page in _REFERENCE]
    trees = []
    for part, pages in parts.items():
        entries = [f"{title} <{page}>" if title else page for title, page in pages]
        trees.append("\n".join(["```{toctree}", f":caption: {part}", ":hidden:", "", *entries, "```"]))
    text = re.sub(r"(?m)^What it is.*$", _README.format(start="# mergeflow", end="## Install"), source[0])
    text = text.replace("the gallery of the site", "the [gallery](reference/gallery.md)").partition("| part |")[0]
    install = "## Install\n\n" + _README.format(start="## Install", end="Licence: Apache")
    source[0] = "\n".join([text, install, *trees])


def with_figures(app: Any, name: str, source: list[str]) -> None:
    """Show a study's figures below its question; in the repository, which does not track them, pages have none."""

    def shown(heading: re.Match[str]) -> str:
        files = sorted((DOCS / "research/figures").glob(f"{heading[1]}.*.svg"))
        return heading[0] + "".join(f"\n![{file.stem}](figures/{file.name})\n" for file in files)

    if name.startswith("research/"):
        source[0] = re.sub(r"^### (\w+)\n\n.*\n", shown, source[0], flags=re.MULTILINE)


def escape_formulas(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Take the signs of formulas in docstrings as they are, not as markup."""
    lines[:] = [re.sub(r"(?<!`)[*|](?!`)", r"\\\g<0>", line) for line in lines]


def setup(app: Any) -> None:
    """Connect what is written before and while Sphinx reads the pages."""
    app.connect("config-inited", write_generated, priority=100)  # before Sphinx looks for the extra files
    app.connect("source-read", with_contents)
    app.connect("source-read", without_links_to_files)
    app.connect("source-read", with_figures)
    app.connect("autodoc-process-docstring", escape_formulas)
