"""The page that shows how a job stands: one document, without anything from elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page may only connect to its own origin."""


@cache
def page() -> bytes:
    """The page. It holds nothing of any job: it asks for that, with a token where one is wanted."""
    return Path(__file__).with_name("page.html").read_bytes()
