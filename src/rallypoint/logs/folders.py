"""Makes folders with unique names, without the cost of importing `tempfile`."""

from __future__ import annotations

import os

from rallypoint.base.errors import UserError, user_error

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_"


def temporary_folder() -> str:
    """The folder for temporary files: `TMPDIR`, `TEMP`, `TMP` or a usual one, the first that is writable.

    Raises:
        UserError: none of them is.
    """
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    candidates = [*named, "/tmp", "/var/tmp", "/usr/tmp", "."]
    for folder in candidates:
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            try:
                return os.path.abspath(folder)
            except FileNotFoundError:  # it is relative, and the working directory has been deleted
                continue
    raise UserError(f"no folder for temporary files can be written to, of {', '.join(candidates)}; set TMPDIR to one")


def make_unique(parent: str, prefix: str) -> str:
    """Make a new folder `<parent>/<prefix>XXXXXXXX`, for this user only, and its parents; UserError if that fails."""
    make_all(parent)
    while True:
        suffix = "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(8))
        path = os.path.join(parent, prefix + suffix)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise _refused(path, error) from error
        return path


def make_next(parent: str, name: str) -> str:
    """Make the first of `<parent>/<name>`, `<name>.1`, `<name>.2` ... that does not exist; UserError if that fails."""
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
    """Make a folder and its missing parents; UserError if that fails."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise _refused(path, error) from error


def remove_empty(path: str) -> bool:
    """Remove a folder and those below it that are empty. Returns whether it is gone."""
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


def _refused(path: str, error: OSError) -> UserError:
    return user_error(
        f"the log folder {path!r} cannot be made: {error.strerror or error}; name another folder with --log-dir", error
    )
