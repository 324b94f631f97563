"""What can go wrong in a rendezvous; the branch of the tree in `base.errors` that the contract's section 7.7 names."""

from __future__ import annotations

from rallypoint.base.errors import RallypointError


class RendezvousError(RallypointError):
    """A rendezvous came to nothing."""


class RendezvousClosedError(RendezvousError):
    """The job is over; nobody may join any more."""


class RendezvousTimeoutError(RendezvousError):
    """Not enough nodes came before the join deadline."""


class RendezvousConnectionError(RendezvousError):
    """The control plane cannot be reached, or what listens there is not ours."""


class RendezvousStateError(RendezvousError):
    """The shared state is damaged, or of another version."""


class RendezvousGracefulExitError(RendezvousError):
    """This node was a spare and the job has ended without it."""
