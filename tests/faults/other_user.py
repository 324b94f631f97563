"""A second user of the machine: a copy of this process that becomes that user acts for it."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - looked for at the first connect, where the other user may not read our Python
import os
import pickle
import stat
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

NOBODY = 65534

T = TypeVar("T")


def as_other_user(work: Callable[[], T], uid: int = NOBODY) -> T:
    """What `work` returns, called by a user who has nothing to do with the job. It may import nothing new."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            with open(writing, "wb") as answer:
                try:
                    pickle.dump((work(), ""), answer)
                except BaseException:
                    pickle.dump((None, traceback.format_exc()), answer)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as answer:
        data = answer.read()
    _, ended = os.waitpid(pid, 0)
    assert ended == 0, "the other user's process has failed"
    result, error = pickle.loads(data)
    assert not error, f"as the other user: {error}"
    return result  # type: ignore[no-any-return]


def allowed(work: Callable[[], object]) -> bool:
    """Whether the system lets this be done."""
    try:
        work()
    except (PermissionError, ProcessLookupError):
        return False
    return True


def openings(folder: Path) -> list[str]:
    """What a user can do with the files and folders below a folder, that it should not be able to."""
    while True:
        found = []
        try:
            for path in (folder, *sorted(folder.rglob("*"))):
                deeds = _deeds(path)
                found += [f"{verb} {path.relative_to(folder)}" for verb, work in deeds if as_other_user(_Try(work))]
        except FileNotFoundError:  # a file has got its name meanwhile, under which it must be looked at too
            continue
        return found


class _Try:
    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def __call__(self) -> bool:
        return allowed(self._work)


def _deeds(path: Path) -> list[tuple[str, Callable[[], object]]]:
    if stat.S_ISDIR(path.lstat().st_mode):
        return [
            ("list", lambda: os.listdir(path)),
            ("make a file in", lambda: os.close(os.open(path / "trap", os.O_CREAT | os.O_WRONLY))),
            ("make a link in", lambda: os.symlink("/etc/passwd", path / "trap")),
        ]
    return [
        ("read", lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))),
        ("write", lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))),
        ("remove", lambda: os.unlink(path)),
    ]
