"""All members of a cluster as one: which of them is asked, and what happens when it does not answer.

One member at a time is used for everything, so that a client costs the cluster one connection. The rule for a request
without an answer:

- if it was certainly not done (no member was reached; a member said that it has no leader or knows no such token), it
  is sent again, to the next member;
- if it may have been done, it is sent again only if it is `repeatable`: reading; a lease's grant under an id of our own
  choice, its keep-alive and its end; and whatever the caller says is as good twice as once, or undoes its own
  condition. The answer then comes with `sent_again`;
- else the caller gets an error that says that its outcome is unknown.

A member that is reachable but slow keeps a request that is not repeatable until the deadline, because no other may get
it; a repeatable one goes to the next member after `SLOW` seconds. If all are slow (an overloaded machine), each next
one has twice the time of the previous one. All of it runs on the loop.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Sequence
from typing import NamedTuple

from rallypoint.base.endpoint import Endpoint
from rallypoint.etcd.api import Credentials, EtcdLeaseGone, EtcdRefused, EtcdUnreachable
from rallypoint.etcd.error_classes import RequestOutcome
from rallypoint.etcd.member import PROBE_TIMEOUT, Member, MemberTrouble, open_member
from rallypoint.etcd.messages import Method

SLOW = 2.0
"""Seconds after which something repeatable is asked of another member."""
_MAX_REQUEST_TIMEOUT = 10.0
"""Seconds that a member is waited for at most where all are slow."""
_DEFAULT_REMEDY = "see whether most of its members run"
_PAUSE = 0.1
"""Seconds between two rounds over all members."""


class ClusterRequest(NamedTuple):
    """Something to ask of the cluster. What changes nothing is always repeatable."""

    method: Method
    body: bytes
    repeatable: bool = True
    changes: bool = True


class ClusterResponse(NamedTuple):
    """The answer of the cluster, and whether an earlier sending of the request may have been done."""

    body: bytes
    sent_again: bool


class LeaseExists(Exception):
    """There is a lease with this id already."""


class Cluster:
    """The members at `endpoints`."""

    def __init__(
        self, endpoints: Sequence[Endpoint], tls: ssl.SSLContext | None, credentials: Credentials | None
    ) -> None:
        self._order = random.sample(endpoints, len(endpoints))
        self._tls = tls
        self._credentials = credentials
        self._member: Member | None = None
        self._opening = asyncio.Lock()
        self._last_troubles: dict[Endpoint, MemberTrouble] = {}
        self._request_timeout = PROBE_TIMEOUT
        self._closed = False

    async def ask(self, request: ClusterRequest, timeout_s: float) -> ClusterResponse:
        """Ask until there is an answer.

        Raises:
            EtcdUnreachable: there was none within `timeout_s`.
            EtcdRefused: there will be none.
            EtcdLeaseGone: the lease that it names is gone.
            LeaseExists: the lease that it grants is there.
        """
        attempt = _Attempt(request)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    answer = await self._try(attempt)
                    if answer is not None:
                        return ClusterResponse(answer, attempt.unsure)
        except TimeoutError:
            unknown = request.changes and (attempt.unsure or attempt.sent)
            raise EtcdUnreachable(self._unreachable(timeout_s), unknown) from None
        except EtcdUnreachable as error:
            error.outcome_unknown |= request.changes and attempt.unsure
            raise

    async def _try(self, attempt: _Attempt) -> bytes | None:
        """Ask one member; None if another shall be asked, or the same one again."""
        request = attempt.request
        member = await self.member()
        attempt.sent = True
        try:
            async with asyncio.timeout(attempt.limit):
                body = await member.ask(request.method, request.body)
        except TimeoutError:  # its own: that of the whole request would have cancelled this
            attempt.unsure = True
            attempt.limit = None if attempt.limit is None else 2 * attempt.limit
            self.switch_from(member)
            return None
        except MemberTrouble as trouble:
            attempt.sent = False
            await self._handle_trouble(attempt, member, trouble)
            return None
        attempt.sent = False
        self.reset_timeout()
        return body

    async def _handle_trouble(self, attempt: _Attempt, member: Member, trouble: MemberTrouble) -> None:
        """Return if the request shall be sent again."""
        self._last_troubles[member.endpoint] = trouble
        match trouble.outcome:
            case RequestOutcome.LOGIN if attempt.logins < 2:
                attempt.logins += 1
                await self.log_in(member)
                return
            case RequestOutcome.LOGIN | RequestOutcome.REFUSED | RequestOutcome.NO_USERS if not trouble.ends:
                raise refused_error(trouble)
            case RequestOutcome.LEASE_GONE:
                raise EtcdLeaseGone(error_sentence(trouble))
            case RequestOutcome.LEASE_EXISTS:
                raise LeaseExists
            case RequestOutcome.UNKNOWN:
                if not attempt.request.repeatable:
                    self.switch_from(member)
                    raise EtcdUnreachable(f"{error_sentence(trouble)}: what was asked for may have been done", True)
                attempt.unsure = True
        self.switch_from(member)
        await asyncio.sleep(0 if trouble.ends else _PAUSE)  # no busy loop, where each member refuses at once

    async def log_in(self, member: Member) -> None:
        """Fetch a new token for all that goes over `member`; if that fails for now, another member is used next.

        Raises:
            EtcdRefused: user and password are not taken any more.
        """
        try:
            await member.log_in()
        except MemberTrouble as trouble:
            self._last_troubles[member.endpoint] = trouble
            if trouble.outcome is RequestOutcome.REFUSED:
                raise refused_error(trouble) from None
            self.switch_from(member)

    async def member(self) -> Member:
        """The member that is used, connected to; waits until there is one.

        Raises:
            EtcdRefused: all members are there, and none will ever accept us.
            EtcdUnreachable: this is closed.
        """
        async with self._opening:
            while self._member is None or self._member.closed:
                if self._closed:
                    raise EtcdUnreachable("this client of etcd is closed")
                self._member = await self._open_one()
        return self._member

    async def _open_one(self) -> Member | None:
        """Go round all members once; after that, pause."""
        refusals = []
        for endpoint in list(self._order):
            try:
                member = await open_member(endpoint, self._tls, self._credentials, self._request_timeout)
            except MemberTrouble as trouble:
                self._last_troubles[endpoint] = trouble
                if trouble.outcome is RequestOutcome.REFUSED:
                    refusals.append(trouble)
                    if not trouble.ends:  # the cluster's own answer, which is the same everywhere
                        raise refused_error(trouble) from None
                self._move_to_end(endpoint)
            except asyncio.CancelledError:
                self._move_to_end(endpoint)  # else those with little time would all wait for the same silent one
                raise
            else:
                if self._closed:
                    member.close()
                return member
        if len(refusals) == len(self._order):
            raise refused_error(refusals[0])
        self._request_timeout = min(2 * self._request_timeout, _MAX_REQUEST_TIMEOUT)
        await asyncio.sleep(_PAUSE)
        return None

    def reset_timeout(self) -> None:
        """A member did what it was asked for, so that none need be waited for longer than usual."""
        self._request_timeout = PROBE_TIMEOUT

    def switch_from(self, member: Member) -> None:
        """Use another member from now on, for everything, and give that one more time until it has answered."""
        member.close()
        if self._member is member:
            self._member = None
            self._request_timeout = min(2 * self._request_timeout, _MAX_REQUEST_TIMEOUT)
            self._move_to_end(member.endpoint)

    def _move_to_end(self, endpoint: Endpoint) -> None:
        """Try this one after all others."""
        self._order.remove(endpoint)
        self._order.append(endpoint)

    def _unreachable(self, timeout_s: float) -> str:
        troubles = [self._last_troubles[endpoint] for endpoint in self._order if endpoint in self._last_troubles]
        why = "; ".join(map(str, troubles)) or "no member has answered yet"
        remedy = " and ".join(dict.fromkeys(trouble.diagnosis.remedy or _DEFAULT_REMEDY for trouble in troubles))
        where = ",".join(map(str, sorted(self._order)))
        return f"etcd at {where} gave no answer within {timeout_s:g} s ({why}); {remedy or _DEFAULT_REMEDY}"

    def close(self) -> None:
        """End the connection, and open no other that lasts."""
        self._closed = True
        if self._member is not None:
            self._member.close()


class _Attempt:
    """A request under way. `unsure`: an earlier sending may have been done; `sent`: the present one may be, and has
    `limit` seconds."""

    def __init__(self, request: ClusterRequest) -> None:
        self.request = request
        self.unsure = False
        self.sent = False
        self.logins = 0
        self.limit = SLOW if request.repeatable else None


def error_sentence(trouble: MemberTrouble) -> str:
    """A sentence on what went wrong, and what to do."""
    remedy = f"; {trouble.diagnosis.remedy}" if trouble.diagnosis.remedy else ""
    return f"etcd at {trouble.endpoint} {trouble.diagnosis.problem}{remedy}"


def refused_error(trouble: MemberTrouble) -> EtcdRefused:
    """The error for it."""
    return EtcdRefused(error_sentence(trouble))
