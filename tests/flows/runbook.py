"""The runbook as data: the blocks of docs/operations.md, and what to do with each."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/operations.md"
_BLOCK = re.compile(
    r"(?:<!-- test: (?P<how>\w+)[^>]*-->\n)?```(?P<language>console|python)\n(?P<text>.*?)```", re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        how: `run`; `servers` (only where there are some), `background` (it is a server), `never`; `refused` (status 1).
        language: console or python.
        text: what stands between the fences.
    """

    how: str
    language: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        return [words for line in self.text.splitlines() if (words := shlex.split(line, comments=True))]


def read_blocks(names: dict[str, str], page: Path = PAGE) -> list[Block]:
    """Read a page's blocks in order; `names` are what the page leaves to its reader, with the values for them."""
    text = page.read_text(encoding="utf-8")
    for name, value in names.items():
        text = re.sub(rf"\b{name}\b", value, text)
    return [Block(block["how"] or "run", block["language"], block["text"]) for block in _BLOCK.finditer(text)]
