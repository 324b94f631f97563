"""Making folders with names of our own that nobody else has, without the cost of importing `tempfile`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rallypoint.base.errors import UserError, user_error

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_"


def temporary_folder() -> str:
    """The folder for temporary files: `TMPDIR`, `TEMP`, `TMP` or a usual place, the first that can be written to.

    Raises:
        UserError: none of them can.
    """
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    candidates = [*named, "/tmp", "/var/tmp", "/usr/tmp", "."]
    for folder in candidates:
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            try:
                return os.path.abspath(folder)
            except FileNotFoundError:  # it is below the working directory, and that has been deleted
                continue
    raise UserError(f"no folder for temporary files can be written to, of {', '.join(candidates)}; set TMPDIR to one")


def make_unique(parent: str, prefix: str) -> str:
    """Make a folder `<parent>/<prefix>XXXXXXXX` that did not exist, for this user alone, and its parents.

    Raises:
        UserError: it cannot be made; says why.
    """
    make_all(parent)
    for suffix in _suffixes():
        path = os.path.join(parent, prefix + suffix)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise _refused(path, error) from error
        return path
    raise AssertionError("suffixes never end")


def make_next(parent: str, name: str) -> str:
    """Make the first of `<parent>/<name>`, `<name>.1`, `<name>.2` and so on that does not exist yet.

    Raises:
        UserError: it cannot be made; says why.
    """
    path, number = os.path.join(parent, name), 0
    while True:
        try:
            os.mkdir(path)
        except FileExistsError:
            number += 1
            path = os.path.join(parent, f"{name}.{number}")
        except OSError as error:
            raise _refused(path, error) from error
        else:
            return path


def make_all(path: str) -> None:
    """Make a folder and its parents where they are missing.

    Raises:
        UserError: it cannot be made; says why.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise _refused(path, error) from error


def remove_empty(path: str) -> bool:
    """Remove a folder and those below it as far as nothing is in them. Returns whether it is gone."""
    try:
        with os.scandir(path) as entries:
            folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for folder in folders:
            remove_empty(folder)
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:  # something is in it, or it is not ours to remove
        return False
    return True


def _suffixes() -> Iterator[str]:
    while True:
        yield "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(8))


def _refused(path: str, error: OSError) -> UserError:
    return user_error(
        f"the log folder {path!r} cannot be made: {error.strerror or error}; name another folder with --log-dir", error
    )
