"""Records what imports read from the environment, and what they change in it.

Law: variables that every worker has of its own must not be read. A reader is reported at once, since nothing that is
    imported afterwards would help.
"""

from __future__ import annotations

import os
import sys

from rallypoint.workers.preload.loop_filters import kept_prefixes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from types import FrameType
    from typing import Any


class EnvironRecorder:
    """Records, while it is entered, each variable that Python code reads from `os.environ`.

    `read` holds names, whether set or not, and `beginnings` the prefixes of the names that a loop over all variables
    has kept; each with the file and line of its first reader. `changed` is what the imports have set (None: removed),
    known at the end. Reads by C code are not seen.

    Args:
        own: names of variables that each worker has of its own.
        refuse: called when one of these is read, with file and line and a text that says what was read.
    """

    def __init__(self, own: Collection[str], refuse: Callable[[str, str], None]) -> None:
        self.read: dict[str, str] = {}
        self.prefixes: dict[str, str] = {}
        self.changed: dict[bytes, bytes | None] = {}
        self._own = frozenset(own)
        self._refuse = refuse

    def __enter__(self) -> EnvironRecorder:
        self._before = dict(os.environb)
        self._kind: Any = type(os.environ)
        self._original = original = self._kind.__getitem__
        self._original_names = names = self._kind.__iter__
        self._theirs = {original.__code__.co_filename, self._kind.get.__code__.co_filename}
        pairs: Any = type(os.environ.items()).__iter__
        read, loop = self.read, pairs.__code__

        def noted(environ: Any, name: Any) -> Any:
            # What a loop over `items()` keeps was decided when it began.
            if isinstance(name, (str, bytes)) and sys._getframe(1).f_code is not loop:
                text = os.fsdecode(name)
                if text not in read:
                    self._note(text)
            return original(environ, name)

        def went_through(environ: Any) -> Any:
            self._note_loop()
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

    def _note(self, name: str) -> None:
        self.read[name] = where = frame_location(self._reader())
        if name in self._own:
            self._refuse(where, f"reads {name}")

    def _note_loop(self) -> None:
        frame = self._reader()
        where, beginnings = frame_location(frame), kept_prefixes(frame)
        if beginnings is None:
            self._refuse(where, "copies all environment variables")
            return
        for beginning in beginnings:
            self.prefixes.setdefault(beginning, where)
            own = [name for name in sorted(self._own) if name.startswith(beginning)]
            if own:
                self._refuse(where, f"reads all environment variables that begin with {beginning!r}, as {own[0]} does")

    def _reader(self) -> FrameType:
        """The reader: the first frame that is neither here nor in the modules that implement `os.environ`."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename in (*self._theirs, __file__):
            frame = frame.f_back
        return frame


def frame_location(frame: FrameType) -> str:
    """File and line that a frame executes; the file relative to the folder of `sys.path` that it is in."""
    path = frame.f_code.co_filename
    roots = [each for each in sys.path if each and path.startswith(f"{each.rstrip('/')}/")]
    root = max(roots, key=len, default="").rstrip("/")
    return f"{path[len(root) + 1 :] if root else path}:{frame.f_lineno}"


def replace(environ: Iterable[tuple[bytes, bytes]], changed: dict[bytes, bytes | None]) -> None:
    """Replace the variables of this process by these, with the changes of the imports on top."""
    os.environ.clear()
    for name, value in environ:
        os.environb[name] = value
    for name, new in changed.items():
        if new is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = new
