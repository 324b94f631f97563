"""The page of errors."""

from __future__ import annotations

from pathlib import Path

from docs.generate.messages import Catalogue
from docs.generate.source import error_tree
from docs.generate.source import errors as errors_of

HEAD = """\
# Errors

The messages that end a command, after the name of the program: `rallyrun: error: ...`. Each is one sentence that says
what was wrong, with the value (here `…`). Most say after a semicolon what to do; if a message does not, this page does.

The class is in brackets, for those who call Rallypoint from Python; most are subclasses of
`rallypoint.base.errors.RallypointError` ([the hierarchy](../python/launching.md#errors)). A `UsageError` ends a
command with exit code 2, the others with 1, or as
[`--exit-codes=classified`](../exit-codes.md) says. `Refusal`, `Nothing`, `CommandRefused`, `HandshakeError`,
`HostError` and the like appear as parts of other messages.

`ChildFailedError` has no message but a report: which workers failed, where, how and why.
"""

KINDS = (error_tree() - {"ChildFailedError"}) | {
    "user_error",  # makes one of several classes
    *("CommandRefused", "HandshakeError", "HostError", "HostlistError", "TlsError"),
    *("Refusal", "Nothing"),  # of clusters
}
"""The classes and functions by which sentences are made that a user may be shown."""

ERRORS = Catalogue(Path(__file__).with_suffix(".toml"), errors_of(KINDS))


def page() -> str:
    """The page, in Markdown."""
    return f"{HEAD}\n" + ERRORS.sections()
