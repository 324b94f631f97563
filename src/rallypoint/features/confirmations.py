"""Confirmations: a node asks before it starts a round's workers if the coordinator was silent for the lease, or if its
workers are fenced.

Law: a confirmation is valid while nobody else can be the coordinator, at most for a lease. If too little of the lease
remains, answer the node after the leader's lease is extended.
"""

from __future__ import annotations

from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.extension import Extension
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.protocol.messages import Confirmed, ConfirmRequest

_LEAST_PART = 2
"""The minimum part of the lease for which a confirmation is valid, as a divisor."""


class Confirmations(Extension):
    """The confirmations of one coordinator."""

    def __init__(self, job: Coordinator) -> None:
        self.job = job
        self.handlers = {ConfirmRequest: self._on_request}
        self._waiting: dict[int, ConfirmRequest] = {}
        """Requests that wait until the leader's lease is extended, by session."""

    def _on_request(self, speaker: SessionRecord, request: ConfirmRequest, _now: float) -> None:
        lease, leads_for = self.job.settings.lease, self.job.leads_for
        if leads_for < lease / _LEAST_PART:
            self._waiting[speaker.number] = request
        else:
            self.job.send(speaker.number, Confirmed(request.number, min(lease, leads_for)))

    def tick(self, now: float) -> None:
        """Answer waiting nodes if enough of the lease remains."""
        waiting, self._waiting = self._waiting, {}
        for session, request in waiting.items():
            if (speaker := self.job.sessions.get(session)) is not None:
                self._on_request(speaker, request, now)
