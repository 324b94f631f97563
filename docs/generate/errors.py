"""The page of errors."""

from __future__ import annotations

from pathlib import Path

from docs.generate.messages import Catalogue
from docs.generate.source import error_tree
from docs.generate.source import errors as errors_of

HEAD = """\
# Errors

What ends a command, behind the name of the program: `rallyrun: error: ...`. Each is one sentence that says what was
wrong, with the value (here `…`), and most say behind a semicolon what to do; where that is missing, it stands here.

The class is in brackets, for those who call Rallypoint from Python; most are below
`rallypoint.base.errors.RallypointError` ([the tree](../python/launching.md#errors)). A `UsageError`, and what is
wrong with a flag (`ArgumentTypeError`), ends a command with exit code 2, the others with 1, or as
[`--exit-codes=classified`](../exit-codes.md) says. `Refusal`, `Nothing`, `CommandRefused`, `HandshakeError`,
`HostError` and the like are parts of the sentences of others.

`ChildFailedError` has no sentence but a report: what workers have failed, where, how and why.
"""

KINDS = (error_tree() - {"ChildFailedError"}) | {
    "user_error",  # makes one of several classes
    *("ArgumentTypeError", "CommandRefused", "HandshakeError", "HostError", "HostlistError", "TlsError"),
    *("Refusal", "Nothing"),  # of clusters
}
"""The classes and functions by which sentences are made that a user may be shown."""

ERRORS = Catalogue(Path(__file__).with_suffix(".toml"), errors_of(KINDS))


def page() -> str:
    """The page, in Markdown."""
    return f"{HEAD}\n" + ERRORS.sections()
