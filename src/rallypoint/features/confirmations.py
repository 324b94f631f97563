"""Confirmations: a node that has not heard the coordinator for the lease, or whose workers are fenced, asks before it
starts the workers of a round.

Law: a confirmation holds for as long as nobody else can be the coordinator, and for a lease at most. Where that is too
short a part of the lease, the node is answered when the leader's lease has been extended.
"""

from __future__ import annotations

from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.extension import Extension
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.protocol.messages import Confirmed, ConfirmRequest

_LEAST_PART = 2
"""The part of the lease for which a confirmation holds at least, as a divisor."""


class Confirmations(Extension):
    """Those of one coordinator."""

    def __init__(self, job: Coordinator) -> None:
        self.job = job
        self.handlers = {ConfirmRequest: self._on_request}
        self._waiting: dict[int, ConfirmRequest] = {}
        """Requests that wait until it is known for longer who the coordinator is, by session: one each."""

    def _on_request(self, speaker: SessionRecord, request: ConfirmRequest, _now: float) -> None:
        lease, leads_for = self.job.settings.lease, self.job.leads_for
        if leads_for < lease / _LEAST_PART:
            self._waiting[speaker.number] = request
        else:
            self.job.send(speaker.number, Confirmed(request.number, min(lease, leads_for)))

    def tick(self, now: float) -> None:
        """Answer the nodes that have waited, if it is known now."""
        waiting, self._waiting = self._waiting, {}
        for session, request in waiting.items():
            if (speaker := self.job.sessions.get(session)) is not None:
                self._on_request(speaker, request, now)
