"""`rallyctl serve`: its endpoint, refusals, and `rallyctl status` of its jobs."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.cli import rallyctl
from rallypoint.cli.serve import _endpoint, _pages
from rallypoint.control.coordinator.jobs import ManyJobs
from rallypoint.control.membership.state import Succeed
from tests.unit.coordinator.sockets import serving
from tests.unit.coordinator.test_jobs import Node, World


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("a:81", "a:81"),
        (":81", "*:81"),
        ("*:81", "*:81"),
        (":", "*:7"),
        ("0.0.0.0", "0.0.0.0:7"),
        ("[::1]:81", "[::1]:81"),
    ],
)
def test_endpoint(given: str, place: str) -> None:
    assert str(_endpoint("--http", given, 7)) == place


@pytest.mark.parametrize(
    ("http", "token", "mode", "text"),
    [
        ("29480", "a token of 32 letters or of more" * 2, 0o644, "is accessible to other users"),
        ("29480", "short", 0o600, "does not contain a token"),
        ("", "any", 0o600, "has no effect without --http"),
        ("localhost:x", "", 0o600, "--http: endpoint"),
    ],
)
def test_invalid_pages(http: str, token: str, mode: int, text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    file.chmod(mode)
    with pytest.raises(UserError, match=text):
        _pages(ManyJobs(), Namespace(http=http, http_token_file=str(file) if token else ""))


def test_status_all(capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    world.jobs = ManyJobs()
    with serving(world.jobs) as server:
        done = Node(world, 1, job="done")
        done.joins()
        done.says(Succeed(0))
        done.goes()
        Node(world, 2, job="goes-on").joins()

        def shown(*more: str) -> str:
            assert rallyctl.main(["status", f"127.0.0.1:{server.port}", *more]) == 0
            return capsys.readouterr().out

        assert "done" not in shown()
        text = shown("--all")
        assert text.index("goes-on") < text.index("\nended\n") < text.index("done  succeeded")
        found = json.loads(shown("--all", "--json"))
        assert (found["job"], found["phase"]) == ("goes-on", "running")
        assert [(job["job"], job["phase"]) for job in found["ended"]] == [("done", "succeeded")]
        assert "done" not in shown("--all", "--rdzv-id=goes-on")
