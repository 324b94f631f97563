"""`rallyctl serve --http`: where the pages are served, and what is refused before anything is served."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.cli.serve import _endpoint, _pages
from rallypoint.control.coordinator.jobs import ManyJobs


@pytest.mark.parametrize(
    ("given", "place"),
    [("81", "localhost:81"), (":81", "localhost:81"), ("0.0.0.0", "0.0.0.0:29480"), ("[::1]:81", "[::1]:81")],
)
def test_where_the_pages_are_served(given: str, place: str) -> None:
    assert str(_endpoint(given)) == place


@pytest.mark.parametrize(
    ("http", "token", "mode", "text"),
    [
        ("29480", "a token of 32 letters or of more" * 2, 0o644, "can be read or written by others"),
        ("29480", "short", 0o600, "does not hold a token"),
        ("", "any", 0o600, "has an effect only with --http"),
        ("localhost:x", "", 0o600, "--http: endpoint"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(http: str, token: str, mode: int, text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    file.chmod(mode)
    with pytest.raises(UserError, match=text):
        _pages(ManyJobs(), Namespace(http=http, http_token_file=str(file) if token else ""))
