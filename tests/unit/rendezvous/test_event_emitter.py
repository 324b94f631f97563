"""A handler's rendezvous events: their receiver and thread, and that errors harm nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from rallypoint.control.membership.state import Drain
from rallypoint.control.protocol.errors import RendezvousTimeoutError
from rallypoint.observe.telemetry import handlers as event_handlers
from rallypoint.observe.telemetry.agent_events import NodeState, RdzvEvent
from rallypoint.observe.telemetry.handlers import RENDEZVOUS, log_handlers
from tests.ports import free_port
from tests.unit.rendezvous.test_elastic import handler, handlers, meet


class Kept(logging.Handler):
    """Records events and their threads."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[RdzvEvent] = []
        self.threads: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(RdzvEvent.deserialize(record.getMessage()))
        self.threads.add(threading.current_thread().name)

    def said(self) -> list[tuple[NodeState, int | None, str]]:
        """State, rank and last words of the events."""
        return [(event.node_state, event.rank, event.message.partition("' ")[2]) for event in self.events]


@pytest.fixture(name="kept")
def _kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    kept = Kept()
    monkeypatch.setitem(log_handlers, RENDEZVOUS, kept)
    event_handlers._loggers.pop(RENDEZVOUS, None)
    yield kept
    logging.getLogger(f"torchelastic-events-{RENDEZVOUS}").removeHandler(kept)
    event_handlers._loggers.pop(RENDEZVOUS, None)


def test_events_of_two_rounds_on_the_calling_thread(kept: Kept) -> None:
    node = handler("c10d", "localhost:0", 1)
    ports = [info.master_port for info in (node.next_rendezvous().bootstrap_store_info for _ in range(2)) if info]
    assert node.shutdown()
    running = NodeState.RUNNING
    assert [each for each in kept.said() if each[0] is running] == [
        (running, None, "attempts to join the next round of the rendezvous 'job'."),
        (running, 0, "has joined round 0 of the rendezvous 'job' as rank 0 in a world of size 1."),
        (running, None, "attempts to join the next round of the rendezvous 'job'."),
        (running, None, "removed itself from the participants of round 0 of the rendezvous 'job'."),
        (running, 0, "has joined round 1 of the rendezvous 'job' as rank 0 in a world of size 1."),
    ]
    assert [each.node_state for each in kept.events].count(NodeState.INIT) == 1, (
        "only from the host of the control plane"
    )
    assert [each.master_endpoint for each in kept.events if each.rank == 0] == [f"127.0.0.1:{port}" for port in ports]
    assert {each.run_id for each in kept.events} == {"job"}
    assert kept.threads == {threading.current_thread().name}


def test_handlers_of_a_process_are_numbered_and_learn_of_ended_rounds(kept: Kept) -> None:
    with handlers("c10d", f"127.0.0.1:{free_port()}", 2) as made:
        meet(made)
        joined = [event for event in kept.events if event.rank is not None]
        assert sorted(event.rank or 0 for event in joined) == [0, 1]
        assert len({event.local_id for event in joined}) == 2
        for event in joined:
            assert event.message.startswith(f"The node '{event.hostname}_{event.pid}_{event.local_id}' has joined")
        # A program with its own loop may only poll the number of waiting nodes.
        first, second = made
        assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0
        over = threading.Event()
        second.listen(lambda _notice: over.set())
        first.send(Drain(0))
        assert over.wait(30)
        assert second.num_nodes_waiting() == 1
        second.listen(None)
        meet(made)
        assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0


def test_a_timeout_is_one_event_with_its_trace(kept: Kept) -> None:
    port = free_port()
    node = handler("c10d", f"localhost:{port}", 2, join_timeout=1)
    with pytest.raises(RendezvousTimeoutError, match=r"1 of 2 nodes had joined \(.*\), 1 was missing") as raised:
        node.next_rendezvous()
    node.shutdown()
    assert "all nodes were started with the same --rdzv-endpoint, --nnodes and --rdzv-id" in str(raised.value)
    (failed,) = [event for event in kept.events if event.node_state is NodeState.FAILED]
    assert failed.message.startswith(
        f"RendezvousTimeoutError: the rendezvous of job 'job' at localhost:{port} did not complete"
    )
    assert failed.message in failed.error_trace


def test_a_failing_event_handler_costs_a_log_line(
    kept: Kept, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_record: logging.LogRecord) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(kept, "emit", broken)
    node = handler("c10d", "localhost:0", 1)
    assert node.next_rendezvous().rank == 0
    assert node.shutdown()
    assert "the disk is full" in caplog.text
