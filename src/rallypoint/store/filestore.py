"""A store in a file shared by processes, on one machine or over a file system with working locks.

The file has the format of torch's FileStore, so both can share it. Each operation locks the whole file, and reads on
from the last position. A waiting store checks the file's size every 10 ms, because a file cannot report changes.

While the file is locked, nobody else writes, so an incomplete record at its end comes from a writer that was killed. It
counts as not written, and the next writer cuts it off. A file that does not start like a store's is never written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, ClassVar

from rallypoint.base.clock import Deadline
from rallypoint.base.private_files import replace_file
from rallypoint.store.api import (
    DEFAULT_TIMEOUT,
    Store,
    increased,
    key_text,
    pairs,
    torch_module,
    value_bytes,
    with_slash,
)
from rallypoint.store.errors import StoreConnectionError, StoreProtocolError

if TYPE_CHECKING:
    from datetime import timedelta

_POLL = 0.01
_PIECE = 1 << 20


class FileStore(Store):
    """A store in the file at `path`.

    Args:
        path: the file; created if missing.
        world_size: how many stores will open it; the last one to close removes it. Negative: the file stays.
        timeout: default seconds, or a timedelta, that methods wait.
        compact_above: size in bytes above which the file is rewritten with only the latest values, each time it
            doubles; None for never, as when torch also reads the file. Not in torch.

    Raises:
        StoreConnectionError: the file cannot be opened.
        StoreProtocolError: the file is not a store's.

    Differences from torch: torch's `delete_key` also returns True for missing keys, its `num_keys` and `list_keys`
    include the record that counts openers, and it closes when collected, while this store needs `close`.
    """

    _mutex: ClassVar[threading.RLock] = threading.RLock()
    """Held by the thread that locks a file, across all stores of this process: a file's lock does not exclude other
    threads, and torch waits for it without releasing the interpreter.

      1. Thread A has locked the file and needs the interpreter to read it.
      2. Thread B opens torch's store of that file (`to_torch`), which waits for the lock.
      3. Neither continues, nor does any other thread.
    """

    def __init__(
        self,
        path: str,
        world_size: int = -1,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        *,
        compact_above: int | None = None,
    ) -> None:
        super().__init__(timeout)
        self.path = path
        self._compact_above = compact_above
        self._world_size = world_size
        self._content: dict[bytes, bytes] = {}
        self._inode = 0
        self._size = 0  # bytes of the file that `_content` includes
        self._closed = False
        self._file: io.FileIO | None = None  # open for an operation, or left open by a ^C
        with self._mutex, self._locked() as append:
            append(self._counted(REFCOUNT, 1))

    def set(self, key: str, value: str | bytes) -> None:
        with self._mutex, self._locked() as append:
            append(setting(with_slash(key), value_bytes(value)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        expected_value, new = value_bytes(expected), value_bytes(desired)
        present = self._change(key, lambda present: new if expected_value == (present or b"") else None)
        return expected_value if present is None else present

    def add(self, key: str, amount: int) -> int:
        return int(self._change(key, lambda present: increased(key, present, amount)) or b"0")

    def append(self, key: str, value: str | bytes) -> None:
        self._change(key, lambda present: (present or b"") + value_bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        with self._mutex, self._locked(shared=True):
            return all(with_slash(key) in self._content for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._wait_for(keys, self._seconds(timeout))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait_for(keys, self._timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        records = [setting(with_slash(key), value) for key, value in pairs(keys, values)]
        with self._mutex, self._locked() as append:
            append(b"".join(records))

    def delete_key(self, key: str) -> bool:
        name = with_slash(key)
        with self._mutex, self._locked() as append:
            if name not in self._content:
                return False
            append(removing(name))
            return True

    def list_keys(self) -> list[str]:
        """The keys, except those that count openers and closers."""
        with self._mutex, self._locked(shared=True):
            return [key_text(key[1:]) for key in self._content if key.startswith(b"/")]

    def clone(self) -> FileStore:
        """Create another store on the same file; it counts towards the world size."""
        return FileStore(self.path, self._world_size, self._timeout, compact_above=self._compact_above)

    def has_extended_api(self) -> bool:
        return False

    def to_torch(self) -> Any:
        module = torch_module()
        with self._mutex:
            return module.FileStore(self.path, -1)

    def close(self) -> None:
        """Close the file, and remove it after all of the world size close it. Idempotent."""
        if self._closed:
            return
        with self._mutex, self._locked() as append:
            append(self._counted(CLEANUP, 1))
            append(self._counted(REFCOUNT, -1))
            all_closed = 0 <= self._world_size <= int(self._content[CLEANUP])
            if all_closed and self._content[REFCOUNT] == b"0":
                os.unlink(self.path)
        self._closed = True

    def _title(self) -> str:
        return f"the store in {self.path}"

    def _wait_for(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        names = [with_slash(key) for key in keys]
        deadline = Deadline.after(timeout)
        while True:
            with self._mutex, self._locked(shared=True):
                if all(name in self._content for name in names):
                    return [self._content[name] for name in names]
            if deadline.expired:
                raise self._keys_timeout(keys, timeout)
            while not self._changed() and not deadline.expired:
                time.sleep(min(_POLL, deadline.remaining()))

    def _changed(self) -> bool:
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return self._inode != 0
        return (now.st_ino, now.st_size) != (self._inode, self._size)

    def _change(self, key: str, choose: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Replace a value (None: missing) with the result of `choose` (None: no change); return the resulting value."""
        name = with_slash(key)
        with self._mutex, self._locked() as append:
            present = self._content.get(name)
            new = choose(present)
            if new is None:
                return present
            append(setting(name, new))
            return new

    def _counted(self, name: bytes, amount: int) -> bytes:
        return setting(name, increased(key_text(name), self._content.get(name), amount))

    @contextlib.contextmanager
    def _locked(self, shared: bool = False) -> Iterator[Callable[[bytes], None]]:
        """Lock the file and read its new records; yield a function that appends records.

        The caller holds the mutex. It is not taken here: a ^C could arrive after that and before the block is entered.
        """
        with self._opened(fcntl.LOCK_SH if shared else fcntl.LOCK_EX) as file:

            def append(records: bytes) -> None:
                _write(file, self._size, records)
                self._apply_records(records, len(records))

            yield append
            if self._compact_above is not None and file >= 0 and not shared and self._size > self._compact_above:
                self._compact(file)

    def _compact(self, file: int) -> None:
        """Replace this file, which we have locked exclusively, with one that contains only the latest values.

        A reader or writer that waits for the lock finds its file gone, and opens the new one.
        """
        records = b"".join(setting(key, value) for key, value in self._content.items())
        self._compact_above = max(self._compact_above or 0, 2 * len(records))
        with contextlib.suppress(OSError):  # a full disk or another user's folder: retry at twice the size
            seen = os.fstat(file)
            if seen.st_uid == os.geteuid():  # the new file would belong to us
                replace_file(self.path, records, mode=stat.S_IMODE(seen.st_mode))

    @contextlib.contextmanager
    def _opened(self, lock: int) -> Iterator[int]:
        if self._closed:
            raise StoreConnectionError(f"{self._title()} cannot be used any more: it was closed; open a new store")
        if self._file is not None:
            self._file.close()
        try:
            file = self._open_locked(lock)
        except OSError as error:
            raise StoreConnectionError(
                f"{self._title()} cannot be opened ({error.strerror}); use a file in a writable folder"
            ) from error
        if file is None:  # the last store closed it, and reading does not create it again
            self._reset_content(0)
            yield -1
            return
        try:
            self._read_new_records(file.fileno())
            if lock == fcntl.LOCK_EX and os.fstat(file.fileno()).st_size > self._size:
                os.ftruncate(file.fileno(), self._size)  # a killed writer's remnant
            yield file.fileno()
        finally:
            file.close()  # this releases the lock

    def _open_locked(self, lock: int) -> io.FileIO | None:
        """Open and lock the file; None if it is missing and would only be read.

        If it was removed while we waited for the lock, open its replacement.
        """
        while True:
            self._file = None
            try:
                self._file = file = _opened_file(self.path, lock)
            except FileNotFoundError:
                if lock == fcntl.LOCK_SH:
                    return None
                raise
            try:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(errno.EINVAL, "it is not a regular file")
                fcntl.flock(file.fileno(), lock)
                if os.fstat(file.fileno()).st_nlink:
                    return file
            except BaseException as error:
                file.close()
                if not isinstance(error, OSError) or error.errno != errno.ESTALE:  # on NFS, the file was replaced
                    raise
            file.close()

    def _read_new_records(self, file: int) -> None:
        now = os.fstat(file)
        if now.st_ino != self._inode or now.st_size < self._size:
            self._reset_content(now.st_ino)
        data = b""
        while now.st_size > self._size + len(data):
            # Read in pieces: the first one reveals another kind of file, however large it is.
            at = self._size + len(data)
            piece = os.pread(file, min(max(_PIECE, len(data)), now.st_size - at), at)
            if not piece:
                break
            data += piece
            data = data[self._apply_records(data, now.st_size - self._size) :]
            if _least_end(data) > now.st_size - self._size:
                break  # anything left comes from a killed writer

    def _reset_content(self, inode: int) -> None:
        """Start again with a file that was replaced or removed."""
        self._content.clear()
        self._inode, self._size = inode, 0

    def _apply_records(self, records: bytes, size: int) -> int:
        """Apply the complete records; return their size in bytes. For `size` see `replay`."""
        try:
            applied = replay(records, self._content, size, is_begun=self._size > 0)
        except StoreProtocolError as error:
            raise StoreProtocolError(f"{self.path} cannot be read as a store ({error}); use another path") from None
        self._size += applied
        return applied


def _opened_file(path: str, lock: int) -> io.FileIO:
    flags, mode = (os.O_RDONLY, "rb") if lock == fcntl.LOCK_SH else (os.O_RDWR | os.O_CREAT, "rb+")

    def opener(name: str, _flags: int) -> int:
        # O_NONBLOCK, since a named pipe without a writer would block forever.
        return os.open(name, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o644)

    return io.FileIO(path, mode, opener=opener)


def _write(file: int, at: int, records: bytes) -> None:
    """Append all records, or none if the disk is full."""
    written = 0
    try:
        while written < len(records):
            written += os.pwrite(file, records[written:], at + written)
    except BaseException as error:
        os.ftruncate(file, at)
        if isinstance(error, OSError):
            raise StoreConnectionError(
                f"the FileStore file cannot be written ({error.strerror}); check its disk"
            ) from error
        raise


# The records in the file (contract section 9.7): pure. The file only grows: each record is a key and its new value,
# each after its native u32 length. The latest record of a key counts. A key that begins with a minus deletes the key
# after the minus.

REFCOUNT = b"refcount/"
"""The number of stores that have the file open."""
CLEANUP = b"cleanup/"
"""Number of stores that have closed it."""

_LENGTH = Struct("=I")
_MAX_LENGTH = (1 << 32) - 1
_REMOVED = b"-"


def setting(key: bytes, value: bytes) -> bytes:
    """Encode a record. Raises StoreProtocolError if the value is too long for its length field."""
    if len(value) > _MAX_LENGTH:
        raise StoreProtocolError(
            f"a value of {len(value)} bytes is too long for a file; at most {_MAX_LENGTH} are allowed"
        )
    return _LENGTH.pack(len(key)) + key + _LENGTH.pack(len(value)) + value


def removing(key: bytes) -> bytes:
    return setting(_REMOVED + key, b"")


def replay(data: bytes, content: dict[bytes, bytes], size: int | None = None, *, is_begun: bool = False) -> int:
    """Apply the complete records to `content`.

    Args:
        data: the next bytes of the file.
        content: the latest value of each key.
        size: the file's size from here on; None for `data` alone.
        is_begun: whether records were read before, so that it is certainly a store's file.

    Returns:
        Where in `data` the first record begins that is incomplete in `data` or in the file.

    Raises:
        StoreProtocolError: the file is not a store's.
    """
    size = len(data) if size is None else size
    at = 0
    while (record := _string(data, at)) is not None:
        key, middle = record
        if not key:
            raise StoreProtocolError("it contains an empty key, so it is not a FileStore file")
        record = _string(data, middle)
        if record is None:
            break
        value, at = record
        if key.startswith(_REMOVED):
            content.pop(key[1:], None)
        else:
            content[key] = value
    if not (at or is_begun) and 0 < size < _least_end(data) and not _may_begin(data):
        raise StoreProtocolError("it does not start with a FileStore record, so it is not a FileStore file")
    return at


def _least_end(data: bytes) -> int:
    """The minimum end of the record at the start of `data`, as far as `data` shows."""
    end = _LENGTH.size
    if end <= len(data):
        end += _LENGTH.unpack_from(data)[0] + _LENGTH.size
        if end <= len(data):
            end += _LENGTH.unpack_from(data, end - _LENGTH.size)[0]
    return end


def _may_begin(data: bytes) -> bool:
    """Whether a store's file can begin like this, without a complete record: its first writer was killed."""
    first = setting(REFCOUNT, b"1")
    return data == first[: len(data)]


def _string(data: bytes, at: int) -> tuple[bytes, int] | None:
    """The string that begins at `at`, and its end; None if `data` ends before that."""
    start = at + _LENGTH.size
    if start > len(data):
        return None
    end = start + _LENGTH.unpack_from(data, at)[0]
    return (data[start:end], end) if end <= len(data) else None


def _reset_after_fork() -> None:
    FileStore._mutex = threading.RLock()


os.register_at_fork(after_in_child=_reset_after_fork)
