"""Each change of a message raises the version, so that incompatible builds refuse each other in the greeting."""

from __future__ import annotations

import hashlib
from types import ModuleType

from rallypoint.control.membership import state
from rallypoint.control.protocol import handshake, messages
from rallypoint.failures import cause
from rallypoint.observe.watching import messages as watching

_KNOWN = (24, "d9954f85c8c5934c")
"""The version and the digest of its messages. If the test fails, raise `PROTOCOL_VERSION` and write both here."""


def test_changed_messages_have_a_new_version() -> None:
    shapes = [shape for module in (handshake, messages, watching, state, cause) for shape in _shapes_in(module)]
    digest = hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]
    assert (handshake.PROTOCOL_VERSION, digest) == _KNOWN


def _shapes_in(module: ModuleType) -> list[str]:
    """Names, fields and types of a module's records, sorted by name."""
    records = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    return [
        f"{kind.__name__}({', '.join(f'{name}: {kind.__annotations__[name]}' for name in kind._fields)})"
        for kind in sorted(records, key=lambda kind: kind.__name__)
        if hasattr(kind, "_fields")
    ]
