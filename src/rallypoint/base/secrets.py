"""Secrets that a user gives this process: read once, and removed from the environment that children inherit.

    RALLYPOINT_SECRET, RALLYPOINT_SECRET_FILE                  shared by the nodes of a job, or of several jobs
    RALLYPOINT_ETCD_PASSWORD, RALLYPOINT_ETCD_PASSWORD_FILE    of the user in --rdzv-conf

Laws:

1. A secret is never in a child's environment, in a log line or in an error.
2. Each job has a key derived from the secret. A job's token contains that key; neither the secret nor another job's key
   can be derived from it.
3. A guessable secret is refused, since an observer of one handshake can try guesses offline.
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
"""The beginning of a job's token, and never of a secret."""
_KEY_SIZE = 32
_LEAST_CHARACTERS, _LEAST_DIFFERENT = 20, 8
"""A secret of 32 random bytes has 43 characters; these refuse words and dates, and allow other generators' output."""
_MAX_SECRETS = 2
"""The present secret and, during a replacement, the previous one."""
_LARGEST_FILE = 4096


class Secret(NamedTuple):
    """One or two secrets or tokens: the first is sent, and all are accepted."""

    texts: tuple[str, ...]

    def keys(self, job: str) -> tuple[bytes, ...]:
        """The keys of a job, 32 bytes each; its nodes and its coordinator prove that they have one."""
        return tuple(_key(text, job) for text in self.texts)

    def __repr__(self) -> str:
        return f"Secret({len(self.texts)} not shown)"


def new_secret() -> str:
    return _text(os.urandom(_KEY_SIZE))


def token(secret: Secret, job: str) -> str:
    """The token of one job, which its nodes get instead of the secret. Raises UsageError if `secret` is itself a
    token.
    """
    if secret.texts[0].startswith(TOKEN_PREFIX):
        raise UsageError(f"{SECRET} is the token of a job, and tokens are derived from a secret; give the secret")
    return TOKEN_PREFIX + _text(secret.keys(job)[0])


def is_token(text: str) -> bool:
    """Whether a text has the form of a job's token."""
    return text.startswith(TOKEN_PREFIX) and _bytes(text.removeprefix(TOKEN_PREFIX)) is not None


def job_secret() -> Secret | None:
    """The secret in `RALLYPOINT_SECRET` or in the file of `RALLYPOINT_SECRET_FILE`; None if neither is set. Raises
    UsageError if it is guessable, is not one or two words, or others may read the file.
    """
    text = _from_environment(SECRET)
    if text is None:
        return None
    words = text.split()
    if len(words) > _MAX_SECRETS:
        raise UsageError(f"{SECRET} holds {len(words)} secrets; give one, or two while the first replaces the second")
    for word in words:
        _check(word)
    return Secret(tuple(words)) if words else None


def launch_secret(*, new: bool) -> str:
    """The secret of this process's environment, for the nodes of a job started from here; with `new`, one is created if
    there is none. Raises UsageError: see `job_secret`.
    """
    secret = job_secret()
    if secret is None:
        return new_secret() if new else ""
    return " ".join(secret.texts)


def etcd_password() -> str:
    """The password in `RALLYPOINT_ETCD_PASSWORD` or in the file of `RALLYPOINT_ETCD_PASSWORD_FILE`; empty without
    either. Raises UsageError if the file cannot be read, or others may read it.
    """
    return (_from_environment(ETCD_PASSWORD) or "").removesuffix("\n")


def http_token(path: str, source: str) -> str:
    """The token in a file, which HTTP clients must send; `source` names the option with the path. Raises UsageError if
    the file cannot be read, others may read it, or it has no token.
    """
    words = _read(path, source).split()
    if len(words) != 1 or len(words[0]) < _LEAST_CHARACTERS or not words[0].isascii():
        raise UsageError(
            f"{source}={path!r} does not hold a token of at least {_LEAST_CHARACTERS} ASCII characters; "
            "make one with 'rallyctl secret'"
        )
    return words[0]


def read_job_secret() -> None:
    """Take the secrets from the environment, and read the file of `RALLYPOINT_SECRET_FILE`. The current content counts
    until the next call, even if the file changes. Raises UsageError: see `job_secret`.
    """
    _files.pop(SECRET, None)
    if path := os.environ.get(SECRET + _FILE, ""):
        _files[SECRET] = path, _read(path, SECRET + _FILE)
    job_secret()


def take_from_environment() -> None:
    """Move all secrets from `os.environ` to this process's memory. Call it before processes are started."""
    for variable in (SECRET, ETCD_PASSWORD):
        text = os.environ.pop(variable, None)
        if text is not None:
            _taken[variable] = text


_taken: dict[str, str] = {}
"""The values from the environment, by variable. A variable that is set again, even to nothing, replaces its value."""


_files: dict[str, tuple[str, str]] = {}
"""The path and the text of a file, by variable."""


def _from_environment(variable: str) -> str | None:
    take_from_environment()
    text, path = _taken.get(variable, ""), os.environ.get(variable + _FILE, "")
    if text and path:
        raise UsageError(f"{variable} and {variable}{_FILE} are both set; leave one of them out")
    if path:
        read = _files.get(variable)
        return read[1] if read is not None and read[0] == path else _read(path, variable + _FILE)
    return text or None


def _read(path: str, variable: str) -> str:
    try:
        # O_NONBLOCK, so that a named pipe does not block; only regular files are accepted below.
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
        raise UsageError(f"{variable}={path!r} is not text in UTF-8; make a secret with 'rallyctl secret'") from None


def _check_file(status: os.stat_result, path: str, variable: str) -> None:
    """Refuse a file that others may read. A file from root, as with Kubernetes and systemd, may be readable by our
    group.
    """
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{variable}={path!r} is not a regular file; give the path of one")
    shared = stat.S_IRWXO | stat.S_IRWXG
    if status.st_uid == 0 != os.geteuid():
        shared &= ~stat.S_IRGRP
    if status.st_uid not in (0, os.geteuid()):
        raise UsageError(f"{variable}={path!r} belongs to another user (uid {status.st_uid}); use a file of your own")
    if stat.S_IMODE(status.st_mode) & shared:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise UsageError(f"{variable}={path!r} can be read or written by others (mode {mode}); chmod 600 it")


def _check(word: str) -> None:
    if word.startswith(TOKEN_PREFIX):
        if not is_token(word):
            raise UsageError(
                f"{SECRET} starts like a token but is not one; copy the whole line that 'rallyctl token' prints"
            )
    elif len(word) < _LEAST_CHARACTERS or len(set(word)) < _LEAST_DIFFERENT:
        raise UsageError(
            f"{SECRET} is too easy to guess ({len(word)} characters, {len(set(word))} of them different); "
            "make one with 'rallyctl secret'"
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
