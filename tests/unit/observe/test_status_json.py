"""What `--json` says is documented field by field, and nothing is documented that it does not say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.cli.watching import PHASE_CODES
from rallypoint.observe.status import jobs_json, status_json
from rallypoint.protocol.observation import EventKind, JobSummary, NodeState, Phase
from rallypoint.rendezvous.control_plane import LocalJob
from tests.unit.observe.snapshots import snapshot

PAGE = (Path(__file__).parents[3] / "docs/reference/status.md").read_text()


def documented(title: str) -> list[tuple[str, str]]:
    """The fields of a section's table, and their types."""
    section = PAGE.partition(f"### {title}\n")[2].partition("\n##")[0]
    return re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \|", section, re.MULTILINE)


def fields(value: object, path: str = "") -> Iterator[str]:
    """All fields, as `nodes[].host`; those of the first element stand for all."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield f"{path}.{name}".lstrip(".")
            yield from fields(each, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from fields(value[0], f"{path}[]")


def at(value: object, path: str) -> object:
    """What stands at a path."""
    for name in path.replace("[]", ".0").split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]  # type: ignore[index]
    return value


KINDS = {"integer": int, "string": str, "boolean": bool, "object": dict, "list": list}


@pytest.mark.parametrize(
    ("title", "text"),
    [
        ("A job", status_json(snapshot(), 1e9)),
        ("The jobs of a control plane", jobs_json([JobSummary("job", Phase.RUNNING, 1, 2, 3)])),
        (
            "The jobs of this machine",
            json.dumps({"version": 1, "jobs": [LocalJob(7, "job", "c10d", "node1:29400")._asdict()]}),
        ),
    ],
    ids=["a job", "jobs", "jobs here"],
)
def test_each_field_is_documented_and_none_else(title: str, text: str) -> None:
    seen, rows = json.loads(text), documented(title)
    assert sorted(name for name, _ in rows) == sorted(fields(seen))
    for name, kind in rows:
        found = at(seen, name)
        wanted = (int, float) if kind.startswith("number") else KINDS[kind.partition(" ")[0]]
        assert found is None or isinstance(found, wanted), name


def test_values_that_a_word_may_have_are_all_documented() -> None:
    words = set(re.findall(r"`([a-z_ ]+)`", PAGE))
    assert words >= {each.value for each in Phase}
    assert words >= {each.value for each in NodeState} | {"unreachable", "succeeded"}
    assert words >= {each.value.replace(" ", "_") for each in EventKind}


def test_exit_codes_are_documented() -> None:
    rows = re.findall(r"^\| (\d) \|", PAGE.partition("## Exit codes")[2].partition("\n## ")[0], re.MULTILINE)
    assert sorted(map(int, rows)) == sorted({*PHASE_CODES.values(), 1, 2})
    assert set(PHASE_CODES) == {each.value for each in Phase}
