"""User errors that are also of a kind of Python's own: code that was written for torch catches that kind.

Law: every kind is a class of its own here, so that an error can be pickled and told from the others.
"""

from __future__ import annotations

from json import JSONDecodeError
from pickle import PicklingError

from rallypoint.base.errors import UserError


class UserAssertionError(UserError, AssertionError):
    """Numbers and entry points, which torch asserts."""


class UserRuntimeError(UserError, RuntimeError):
    """See `user_error`."""


class UserTypeError(UserError, TypeError):
    """See `user_error`."""


class UserKeyError(UserError, KeyError):
    """A name that nothing is known by."""


class UserAttributeError(UserError, AttributeError):
    """See `user_error`."""


class UserPicklingError(UserError, PicklingError):
    """What cannot be handed to another process."""


class UserOSError(UserError, OSError):
    """What the kernel refuses; `errno` says why, where it is known."""


class UserFileNotFoundError(UserOSError, FileNotFoundError):
    """See `user_error`."""


class UserPermissionError(UserOSError, PermissionError):
    """See `user_error`."""


class UserNotADirectoryError(UserOSError, NotADirectoryError):
    """See `user_error`."""


class UserTimeoutError(UserOSError, TimeoutError):
    """See `user_error`."""


class UserJSONDecodeError(UserError, JSONDecodeError):
    """A text that is not JSON; where in it, the sentence says."""

    def __init__(self, text: str) -> None:
        JSONDecodeError.__init__(self, "", "", 0)
        self.args = (text,)

    def __reduce__(self) -> tuple[type[UserJSONDecodeError], tuple[str]]:
        return type(self), (str(self),)


_OF_KIND: dict[type[BaseException], type[UserError]] = {
    AssertionError: UserAssertionError,
    RuntimeError: UserRuntimeError,
    TypeError: UserTypeError,
    KeyError: UserKeyError,
    AttributeError: UserAttributeError,
    PicklingError: UserPicklingError,
    OSError: UserOSError,
    FileNotFoundError: UserFileNotFoundError,
    PermissionError: UserPermissionError,
    NotADirectoryError: UserNotADirectoryError,
    TimeoutError: UserTimeoutError,
    JSONDecodeError: UserJSONDecodeError,
}


def user_error(text: str, like: type[BaseException] | BaseException) -> UserError:
    """A `UserError` that those who expect another error catch too.

    Args:
        text: the sentence.
        like: what they expect: a kind, or an error that has come; of the latter `errno` is kept.
    """
    kind = like if isinstance(like, type) else type(like)
    made = next((_OF_KIND[each] for each in kind.__mro__ if each in _OF_KIND), UserError)(text)
    if isinstance(made, OSError) and isinstance(like, OSError):
        made.errno = like.errno
    return made
