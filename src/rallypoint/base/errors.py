"""The error tree, ordered by whose fault an error is and what to do next.

    RallypointError                        any error that Rallypoint itself reports
    ├── UserError                          a value from the user cannot work
    │   ├── UsageError                     a UserError about an option that torchrun does not have
    │   └── UserKeyError, ...              a UserError that is also of the kind that torch raises (`user_error`)
    ├── StoreError                         store/          (also a RuntimeError, like torch's DistError)
    │   ├── StoreTimeoutError              a key was not set in time
    │   ├── StoreConnectionError           the server cannot be reached, or closed the connection
    │   ├── StoreProtocolError             bytes that are not the store's protocol, or exceed its limits
    │   └── QueueEmptyError                a pop that does not wait found nothing
    ├── EtcdError                          etcd/
    │   ├── EtcdUnreachable                no member answered in time; the request may still have taken effect
    │   ├── EtcdRefused                    password, certificate, permission, another protocol
    │   ├── EtcdLeaseGone                  the lease has expired
    │   └── EtcdPackageMissing             the extra `rallypoint[etcd]` is not installed
    ├── RendezvousError                    rendezvous/
    │   ├── RendezvousClosedError          the job has ended; no node can join
    │   ├── RendezvousTimeoutError         not enough nodes joined before the join deadline
    │   ├── RendezvousConnectionError      the control plane cannot be reached, or belongs to another job
    │   ├── RendezvousStateError           the shared state is damaged or of another version
    │   └── RendezvousGracefulExitError    the job ended while this node was a spare
    ├── LoopError                          base/           (also a RuntimeError) the event loop cannot be created
    ├── PreflightError                     a required check failed; this node stays out of the job
    ├── ResourceError                      (also an OSError) no more processes, memory or descriptors
    ├── SignalException                    agent and workers: a signal asked the agent to end
    │   └── NodeLeftInOrder                the agent has ended, and the job continues without this node
    ├── JobPreempted                       the whole job was preempted; it ended after its workers had saved
    └── ChildFailedError                   failures/       workers failed: which, where, how and why

Each message is one sentence that states the problem, with the value, and the remedy.
"""

from __future__ import annotations

from rallypoint.base.light_typing import Any


class RallypointError(Exception):
    """The root."""


class UserError(RallypointError, ValueError):
    """A value from the user cannot work. The message tells the user everything needed."""

    def __str__(self) -> str:
        return BaseException.__str__(self)  # KeyError would quote the message


class UsageError(UserError):
    """A `UserError` about an option that torchrun lacks or a value that it accepts. The command exits with 2, as for
    a wrong flag.
    """


class ResourceError(RallypointError, OSError):
    """This machine ran out of processes, memory or descriptors."""


class PreflightError(RallypointError):
    """A required check failed on this node, which stays out of the job; another node might pass."""


class SignalException(RallypointError):
    """A signal (`sigval`) or an operator (`drained`) asked this process to end. `saved`: all workers acknowledged the
    notice.
    """

    def __init__(self, msg: str, sigval: int, *, saved: bool = False, drained: bool = False) -> None:
        super().__init__(msg)
        self.sigval = sigval
        self.saved = saved
        self.drained = drained


class NodeLeftInOrder(SignalException):
    """This node was asked to end; its workers ended cleanly, and the job continues without it."""


class JobPreempted(RallypointError):
    """The whole job was preempted (`--preempt-signals`): its workers saved, and all nodes ended."""


NEEDS_LINUX = "Rallypoint needs Linux: on Windows use WSL 2, which is Linux, and on macOS a container"
"""The message outside Linux."""


def user_error(text: str, like: type[BaseException] | BaseException) -> UserError:
    """Create a `UserError` that is also of the kind `like`, for code that catches torch's errors. If `like` is an
    error, its `errno` is copied.
    """
    kind = like if isinstance(like, type) else type(like)
    kind = next((base for base in kind.__mro__ if base.__module__ in _STANDARD and base not in _TOO_GENERAL), UserError)
    if kind is UserError:
        return UserError(text)
    if kind not in _made_kinds:
        own = {"__module__": __name__, "__init__": Exception.__init__, "__reduce__": _reduce}
        _made_kinds[kind] = type(f"User{kind.__name__}", (UserError, kind), own)
    error: UserError = _made_kinds[kind](text)
    if isinstance(error, OSError) and isinstance(like, OSError):
        error.errno = like.errno
    return error


_STANDARD = frozenset(("builtins", "json.decoder", "pickle", "_pickle"))
_TOO_GENERAL = (ValueError, Exception, BaseException, object)
_made_kinds: dict[type, Any] = {}


def _reduce(error: UserError) -> tuple[object, ...]:
    """Let pickle recreate the class when it loads the error."""
    return user_error, (str(error), type(error).__bases__[1])


class naming:
    """Prefix UserErrors inside the block with `source`, the origin of the value."""

    def __init__(self, source: str) -> None:
        self._source = source

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UserError):
            text = f"{self._source}: {error}"
            raise (UsageError(text) if isinstance(error, UsageError) else user_error(text, error)) from error
