"""What `native/module.c` gives to Python."""

from collections.abc import Callable

SOURCES: str
"""A digest of the sources that it was built from; `build_native.py` makes it."""
INTERFACE: int
"""Which of the ways to be used that there have been it has."""

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
