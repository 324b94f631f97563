"""The error tree: whose fault it was, and what to do next.

    RallypointError                        anything that Rallypoint itself reports
    ├── UserError                          a value that the user gave cannot work; one sentence says which and why
    │   ├── UsageError                     the same, of an option that torchrun does not have
    │   └── UserKeyError, ...              the same, also of the kind that torch raises there (base.user_errors)
    ├── StoreError                         store/          (also a RuntimeError, as torch's DistError is)
    │   ├── StoreTimeoutError              a key did not come in time
    │   ├── StoreConnectionError           the server cannot be reached, or has gone
    │   ├── StoreProtocolError             bytes that are not the store's protocol, or beyond its bounds
    │   └── QueueEmptyError                a pop that does not wait found nothing
    ├── EtcdError                          etcd/
    │   ├── EtcdUnreachable                no member answered in time; `outcome_unknown` says if it may have been done
    │   ├── EtcdRefused                    password, certificate, permission, another protocol
    │   ├── EtcdLeaseGone                  the lease has ended
    │   └── EtcdPackageMissing                    the extra `rallypoint[etcd]` is not installed
    ├── RendezvousError                    rendezvous/
    │   ├── RendezvousClosedError          the job is over; nobody may join
    │   ├── RendezvousTimeoutError         not enough nodes came before the join deadline
    │   ├── RendezvousConnectionError      the control plane cannot be reached, or is not ours
    │   ├── RendezvousStateError           the shared state is damaged or of another version
    │   └── RendezvousGracefulExitError    a spare is told that the job has ended
    ├── LoopError                          base/           (also a RuntimeError) the event loop cannot be made
    ├── ResourceError                      (also an OSError) processes, memory or descriptors have run out
    ├── SignalException                    agent and workers: a signal asked the agent to end
    │   └── NodeLeftInOrder                       it has, and the job goes on elsewhere
    └── ChildFailedError                   failures/       workers failed; carries who, where, how and why

The message of each is one sentence that names what was wrong, with the value, and what to do next.
"""

from __future__ import annotations


class RallypointError(Exception):
    """Root of the tree above."""


class UserError(RallypointError, ValueError):
    """A value that the user gave cannot work. The message is all that the user needs to see."""

    def __str__(self) -> str:
        return BaseException.__str__(self)  # of those that are something else too, a KeyError would quote it


class UsageError(UserError):
    """As `UserError`, where torchrun has no such option or takes the value: the command ends with the code of a wrong
    flag, 2, which torchrun's contract leaves to us."""


class ResourceError(RallypointError, OSError):
    """This machine has no room for what is needed: processes, memory, descriptors."""


class SignalException(RallypointError):
    """A signal asked this process to end.

    `sigval` is the signal's number.
    """

    def __init__(self, msg: str, sigval: int) -> None:
        super().__init__(msg)
        self.sigval = sigval


class NodeLeftInOrder(SignalException):
    """A signal asked this node to end; its workers have ended in order, and the job goes on without it."""
