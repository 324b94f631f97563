"""Coined words do not come back: each thing has the one name that `docs/glossary.md` gives it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOLDERS = ("src", "tests", "docs", "benchmarks", "examples")
TEXTS = frozenset({".py", ".pyi", ".c", ".h", ".md", ".txt"})
SPARED = frozenset({"CHANGELOG.md", "docs/project/changelog.md", "docs/glossary.md", "tests/unit/test_words.py"})

COINED = {
    "despair": "what it does",
    "errand": "job spec",
    "farewell": "grace period, last message",
    "hush": "clear",
    "minder": "monitor",
    "parcel": "payload",
    "roster": "session registry",
    "sieve": "line filter",
    "tidings": "notification diff",
    "whereabouts": "endpoint resolver",
}
"""Words that stood for something of ours, and what it is called now. None of them has another meaning here."""

_COINED = re.compile(rf"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?i:{'|'.join(COINED)})")


def _texts() -> Iterator[tuple[str, str]]:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    for path in [*paths, *ROOT.glob("*.md"), *ROOT.glob("*.py"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        name = str(path.relative_to(ROOT))
        if name not in SPARED:
            yield name, path.read_text()


def test_no_coined_word() -> None:
    found = [
        f"{name}:{number}: {line.strip()[:120]}  (say {COINED[coined[0].lower()]})"
        for name, text in _texts()
        if _COINED.search(text)
        for number, line in enumerate(text.splitlines(), 1)
        if (coined := _COINED.search(line))
    ]
    assert found == []
