"""Coined words do not come back: each thing has the one name that `docs/glossary.md` gives it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOLDERS = ("man", "src", "tests", "docs", "benchmarks", "examples")
TEXTS = frozenset({".py", ".pyi", ".c", ".h", ".md", ".txt"})
SPARED = frozenset({"CHANGELOG.md", "docs/project/changelog.md", "docs/glossary.md", "tests/unit/test_words.py"})

COINED = {
    "arbiter": "coordinator",
    "beat": "heartbeat",
    "bell": "signal wake-up",
    "birth": "child initialization, process set-up",
    "board": "notice directory",
    "crew": "worker controller, worker group",
    "crowded": "at the connection limit",
    "despair": "what it does",
    "door": "arrival, lazy gate",
    "errand": "job spec",
    "farewell": "grace period, last message",
    "floor": "layer",
    "footing": "process set-up",
    "goodbye": "leave",
    "guardian": "reaper",
    "house": "architecture",
    "hub": "dispatcher",
    "hush": "clear",
    "keeper": "supervisor",
    "ladder": "escalation",
    "minder": "monitor",
    "newcomer": "new node",
    "parcel": "payload",
    "patience": "timeout",
    "pulse": "progress probe",
    "roster": "session registry",
    "rung": "stage",
    "seat": "place, group rank",
    "sieve": "line filter",
    "sight": "clock view",
    "starved": "out of memory",
    "story": "event factory, log",
    "stranger": "unauthenticated peer, intruder",
    "tenant": "shared server",
    "tidings": "notification diff",
    "warm": "preloaded",
    "whereabouts": "endpoint resolver",
    "witness": "evidence",
}
"""Words that stood for something of ours, and what it is called now. None of them has another meaning here."""

PHRASES = {
    "take_up": "begin_round",
    "let_go": "release",
    "rooms": "packages",
    "hang_up": "disconnect",
    "hangs up": "closes the connection",
    "hung up": "disconnected",
    "of no user": "has no user",
    "who has gone": "that has left",
    "start cold": "start without preloading",
    "starts cold": "starts without preloading",
}

ORDINARY = re.compile(
    r"zookeeper|hf_hub|math\.floor|multi[_-]?tenant|warm[_ -]?up|warms? (the page )?cache|warming up",
    re.IGNORECASE,
)
"""Names of others, and what is warm in the plain sense."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_PHRASE = re.compile(rf"(?<![A-Za-z])({'|'.join(PHRASES)})(?![A-Za-z])", re.IGNORECASE)


def _texts() -> Iterator[tuple[str, str]]:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    for path in [*paths, *ROOT.glob("*.md"), *ROOT.glob("*.py"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        name = str(path.relative_to(ROOT))
        if name not in SPARED:
            yield name, path.read_text()


def _coined(text: str) -> set[str]:
    """The coined words and phrases of a text; identifiers count word by word, plurals as singular."""
    text = ORDINARY.sub("", text)
    words = {word.lower() for word in _WORD.findall(text)}
    words |= {word.removesuffix("s") for word in words} | {word.removesuffix("ies") + "y" for word in words}
    return words & COINED.keys() | {phrase.lower() for phrase in _PHRASE.findall(text)}


def test_no_coined_word() -> None:
    found = [
        f"{name}:{number}: {line.strip()[:120]}  (say {', '.join({**COINED, **PHRASES}[each] for each in coined)})"
        for name, text in _texts()
        if _coined(text)
        for number, line in enumerate(text.splitlines(), 1)
        if (coined := _coined(line))
    ]
    assert found == []


def test_words_are_found_in_whatever_form_they_stand() -> None:
    assert _coined("arbiter") == _coined("an_arbiter_of") == _coined("MyArbiter") == _coined("ARBITERS") == {"arbiter"}
    assert _coined("stories, take_up") == {"story", "take_up"}
    assert _coined("heartbeat, warm_up, multi_tenant, the ZooKeeper, github, math.floor") == set()
    assert sum(1 for _ in _texts()) > 500
