"""The interface of `native/module.c`."""

from collections.abc import Callable

SOURCES: str
"""The digest of its sources, from `build_native.py`."""
INTERFACE: int
"""The version of this interface."""

class Sockets:
    """A store and the connections to it. `listener` may be -1 for none; one thread uses it."""

    def __init__(
        self,
        listener: int,
        wake: int,
        descriptors: int,
        limits: tuple[float, float, int, int, int, int, int],
        refused: Callable[[int, int, int, bytes, bytes], None],
        cannot_accept: Callable[[int], int],
        is_other_user: Callable[[int], bool] | None,
    ) -> None: ...
    def serve(self) -> None: ...
    def run_once(self) -> bool: ...
    def add_connection(self, descriptor: int, data: bytes, /) -> None: ...
    def set_peers(self, networks: bytes | None, /) -> None: ...
    def connections(self) -> int: ...
    def close(self) -> None: ...
    def release_memory(self) -> None: ...
