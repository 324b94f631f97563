"""Secrets from a user: read once, and removed from the environment that children inherit.

    RALLYPOINT_SECRET, RALLYPOINT_SECRET_FILE                  shared by the nodes of a job, or of several jobs
    RALLYPOINT_ETCD_PASSWORD, RALLYPOINT_ETCD_PASSWORD_FILE    of the user in --rdzv-conf

Laws:

1. A secret never appears in a child's environment, a log line or an error.
2. Each job has a key derived from the secret. A job's token contains that key; neither the secret nor another job's key
   can be derived from it.
3. A guessable secret is refused, since an observer of one handshake could try guesses offline.
"""

from __future__ import annotations

import os
import stat

from rallypoint.base.errors import UsageError
from rallypoint.base.light_typing import NamedTuple

SECRET = "RALLYPOINT_SECRET"
ETCD_PASSWORD = "RALLYPOINT_ETCD_PASSWORD"
_FILE = "_FILE"

TOKEN_PREFIX = "rpt1-"
"""The start of every job's token, and of no secret."""
_KEY_SIZE = 32
_LEAST_CHARACTERS, _LEAST_DIFFERENT = 20, 8
"""These minimums rule out words and dates. A secret of 32 random bytes has 43 characters."""
_MAX_SECRETS = 2
"""The current secret and, during a rotation, the previous one."""
_LARGEST_FILE = 4096


class Secret(NamedTuple):
    """One or two secrets or tokens: send the first, accept all."""

    texts: tuple[str, ...]

    def keys(self, job: str) -> tuple[bytes, ...]:
        """The keys of a job, 32 bytes each. Its nodes and its coordinator prove to each other that they have one."""
        return tuple(_key(text, job) for text in self.texts)

    def __repr__(self) -> str:
        return f"Secret({len(self.texts)} not shown)"


def new_secret() -> str:
    return _text(os.urandom(_KEY_SIZE))


def token(secret: Secret, job: str) -> str:
    """The token of one job, which nodes get instead of the secret. Raises UsageError if `secret` is already a token."""
    if secret.texts[0].startswith(TOKEN_PREFIX):
        raise UsageError(f"{SECRET} is a job's token, but tokens are derived from a secret; set the secret instead")
    return TOKEN_PREFIX + _text(secret.keys(job)[0])


def is_token(text: str) -> bool:
    """Whether a text looks like a job's token."""
    return text.startswith(TOKEN_PREFIX) and _bytes(text.removeprefix(TOKEN_PREFIX)) is not None


def job_secret() -> Secret | None:
    """The secret in `RALLYPOINT_SECRET` or in the file `RALLYPOINT_SECRET_FILE`; None if neither is set. Raises
    UsageError if it is guessable or not one or two words, or if others may read the file.
    """
    text = _from_environment(SECRET)
    if text is None:
        return None
    words = text.split()
    if len(words) > _MAX_SECRETS:
        raise UsageError(f"{SECRET} contains {len(words)} secrets; use one, or two while the first replaces the second")
    for word in words:
        _check(word)
    return Secret(tuple(words)) if words else None


def launch_secret(*, new: bool) -> str:
    """The secret in this process's environment, for the nodes of a job started from here; with `new`, create one if
    it is missing. Raises UsageError like `job_secret`.
    """
    secret = job_secret()
    if secret is None:
        return new_secret() if new else ""
    return " ".join(secret.texts)


def etcd_password() -> str:
    """The password in `RALLYPOINT_ETCD_PASSWORD` or in the file `RALLYPOINT_ETCD_PASSWORD_FILE`; empty if neither is
    set. Raises UsageError if the file cannot be read, or if others may read it.
    """
    return (_from_environment(ETCD_PASSWORD) or "").removesuffix("\n")


def http_token(path: str, source: str) -> str:
    """Read the token that HTTP clients must send from a file; `source` names the option with the path. Raises
    UsageError if the file cannot be read, contains no token, or is readable for others.
    """
    words = _read(path, source).split()
    if len(words) != 1 or len(words[0]) < _LEAST_CHARACTERS or not words[0].isascii():
        raise UsageError(
            f"{source}={path!r} does not contain a token of at least {_LEAST_CHARACTERS} ASCII characters; create one "
            "with 'rallyctl secret'"
        )
    return words[0]


def read_job_secret() -> None:
    """Take the secrets from the environment, and read the file in `RALLYPOINT_SECRET_FILE`. Later changes of the file
    have no effect until the next call. Raises UsageError like `job_secret`.
    """
    _files.pop(SECRET, None)
    if path := os.environ.get(SECRET + _FILE, ""):
        _files[SECRET] = path, _read(path, SECRET + _FILE)
    job_secret()


def take_from_environment() -> None:
    """Move all secrets from `os.environ` to this process's memory. Call this before starting processes."""
    for variable in (SECRET, ETCD_PASSWORD):
        text = os.environ.pop(variable, None)
        if text is not None:
            _taken[variable] = text


_taken: dict[str, str] = {}
"""The values from the environment, by variable. Setting a variable again, even to nothing, replaces its value."""


_files: dict[str, tuple[str, str]] = {}
"""The path and the content of each file, by variable."""


def _from_environment(variable: str) -> str | None:
    take_from_environment()
    text, path = _taken.get(variable, ""), os.environ.get(variable + _FILE, "")
    if text and path:
        raise UsageError(f"{variable} and {variable}{_FILE} are both set; unset one of them")
    if path:
        read = _files.get(variable)
        return read[1] if read is not None and read[0] == path else _read(path, variable + _FILE)
    return text or None


def _read(path: str, variable: str) -> str:
    try:
        # O_NONBLOCK: a named pipe must not block. Only regular files are accepted below.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_file(os.fstat(fd), path, variable)
            data = os.read(fd, _LARGEST_FILE + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise UsageError(f"{variable}={path!r} cannot be read: {error.strerror}") from None
    if len(data) > _LARGEST_FILE:
        raise UsageError(f"{variable}={path!r} has more than {_LARGEST_FILE} bytes; write one secret per line")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{variable}={path!r} is not UTF-8 text; create a secret with 'rallyctl secret'") from None


def _check_file(status: os.stat_result, path: str, variable: str) -> None:
    """Refuse a file that others may read. Our group may read a file owned by root, as Kubernetes and systemd create
    it.
    """
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{variable}={path!r} is not a regular file; set it to the path of one")
    shared = stat.S_IRWXO | stat.S_IRWXG
    if status.st_uid == 0 != os.geteuid():
        shared &= ~stat.S_IRGRP
    if status.st_uid not in (0, os.geteuid()):
        raise UsageError(f"{variable}={path!r} belongs to another user (uid {status.st_uid}); use a file that you own")
    if stat.S_IMODE(status.st_mode) & shared:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise UsageError(f"{variable}={path!r} is accessible to other users (mode {mode}); run chmod 600 on it")


def _check(word: str) -> None:
    if word.startswith(TOKEN_PREFIX):
        if not is_token(word):
            raise UsageError(
                f"{SECRET} has the prefix of a token but is not valid; copy the whole line that 'rallyctl token' prints"
            )
    elif len(word) < _LEAST_CHARACTERS or len(set(word)) < _LEAST_DIFFERENT:
        raise UsageError(
            f"{SECRET} is too easy to guess ({len(word)} characters, {len(set(word))} different); create one with "
            "'rallyctl secret'"
        )


def _key(text: str, job: str) -> bytes:
    import hashlib
    import hmac

    if text.startswith(TOKEN_PREFIX):
        key = _bytes(text.removeprefix(TOKEN_PREFIX))
        assert key is not None
        return key
    return hmac.new(text.encode(), b"rallypoint job key\0" + job.encode(), hashlib.sha256).digest()


def _text(key: bytes) -> str:
    import base64

    return base64.urlsafe_b64encode(key).decode().rstrip("=")


def _bytes(text: str) -> bytes | None:
    import base64
    import binascii

    try:
        key = base64.b64decode(text + "=", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return key if len(key) == _KEY_SIZE else None
