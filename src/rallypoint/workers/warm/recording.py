"""What the imports read of the environment, and what they changed in it."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


class Recording:
    """While it is entered, each variable that Python code asks `os.environ` for is noted.

    `read` are names, there or not; `everything` is whether the code has gone through all that there are. `changed` is
    what the imports have set (None: taken away), known at the end. What C code reads is not seen.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.everything = False
        self.changed: dict[bytes, bytes | None] = {}

    def __enter__(self) -> Recording:
        self._before = dict(os.environb)
        self._kind: Any = type(os.environ)
        self._original = original = self._kind.__getitem__
        self._original_names = names = self._kind.__iter__
        read = self.read

        def noted(environ: Any, name: Any) -> Any:
            if isinstance(name, (str, bytes)):
                read.add(os.fsdecode(name))
            return original(environ, name)

        def went_through(environ: Any) -> Any:
            self.everything = True
            return names(environ)

        setattr(self._kind, "__getitem__", noted)  # noqa: B010 - no type checker lets a method be assigned
        setattr(self._kind, "__iter__", went_through)  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._kind, "__getitem__", self._original)  # noqa: B010
        setattr(self._kind, "__iter__", self._original_names)  # noqa: B010
        after = dict(os.environb)
        names = {*self._before, *after}
        self.changed = {name: after.get(name) for name in names if self._before.get(name) != after.get(name)}


def replace(environ: Iterable[tuple[bytes, bytes]], changed: dict[bytes, bytes | None]) -> None:
    """Make these the variables of this process, with what the imports changed on top."""
    os.environ.clear()
    for name, value in environ:
        os.environb[name] = value
    for name, new in changed.items():
        if new is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = new
