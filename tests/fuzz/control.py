"""Targets for the control plane: frames, messages, signatures, states, and a coordinator with its requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from rallypoint.control.coordinator.dispatcher import Dispatcher, RestoredState
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import (
    Close,
    Drain,
    Fail,
    NodeId,
    NodeInfo,
    NodeRanks,
    Outcome,
    Preempt,
    PreemptJob,
    Reason,
    RecordProgress,
    Refusal,
    ReportQuiet,
    RoundEnd,
    Settings,
    State,
    Succeed,
    Verdict,
)
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, FrameReader, decode_state, encode_state, frame
from rallypoint.control.protocol.errors import FrameError, RendezvousStateError, SignatureError
from rallypoint.control.protocol.handshake import (
    PROTOCOL_VERSION,
    Challenge,
    HandshakeRefused,
    Hello,
    Proof,
    Welcome,
)
from rallypoint.control.protocol.messages import (
    CauseClues,
    CauseSought,
    CollectedPart,
    CollectionEnded,
    CollectKind,
    CollectRequested,
    ConfigDifference,
    ConfigDiffers,
    Confirmed,
    ConfirmRequest,
    DrainRequested,
    Fault,
    FaultRequested,
    HangFound,
    HangReport,
    Heartbeat,
    JobEnded,
    JoinRefused,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    MissingNode,
    NextStore,
    NodeReport,
    NodesWaiting,
    Notification,
    OperatorAction,
    Placed,
    Placement,
    Preempted,
    Progress,
    ProgressRequest,
    ReportRequested,
    ResumeRequest,
    RoundEnded,
    SessionEnded,
)
from rallypoint.control.protocol.resume_state import ResumeState, after_notification, after_request, requests_to_repeat
from rallypoint.control.protocol.signing import Signers
from rallypoint.failures.cause import Cause, Ending, Restarts
from rallypoint.failures.report import ChildFailedError
from rallypoint.observe.bundle import Piece, decode_bundle, encode_bundle
from rallypoint.observe.hangs.dumps import read_dump, record_of
from rallypoint.observe.hangs.evidence import check_stacks, decode_stacks
from rallypoint.observe.hangs.messages import (
    EvidenceReader,
    NodeEvidence,
    RankEvidence,
    check_evidence,
    decode_evidence,
    deflated,
    encode_evidence,
    inflated,
)
from rallypoint.observe.hangs.report import MAX_LINES, report_lines, stack_lines
from rallypoint.observe.rendezvous_log import RendezvousName, timeout_sentence, waiting_line
from rallypoint.observe.stacks import Frame
from rallypoint.observe.status import status_json, status_lines
from rallypoint.observe.watching import messages as watching
from rallypoint.observe.watching.messages import (
    CollectCommand,
    CommandReply,
    DrainCommand,
    FaultCommand,
    JobList,
    JobPhase,
    JobSummary,
    ListRequest,
    ResizeCommand,
    RestartCommand,
    SnapshotPart,
    StopCommand,
    WatchRequest,
    decode_snapshot,
)
from rallypoint.observe.watching.session import JobWatch
from rallypoint.observe.worker_logs import LogPiece, NodeLogs, decode_logs, encode_logs, log_lines
from tests.fuzz.target import Target

SETTINGS = Settings("job", 1, 3, join_timeout=20.0, last_call_timeout=2.0)
_CAUSE = Cause(0, 0, "host", 42, -9, "Signal 9 (SIGKILL)", "Traceback\n", 1e9, "/e.json")
MEMBER = NodeInfo("default", 2, "10.0.0.1", 7000, None, 3, "train.py")
_PROGRESS = Progress(
    1, False, 1, 2, 3, ("a",), False, 1.0, ("b",), (MissingNode("c", Reason.LOST, 3.0),), 1.0, 2.0, "d", 4.0, True
)
HELLO = Hello(PROTOCOL_VERSION, "job", b"n" * 16, "10.0.0.1", NodeId("10.0.0.1", 7, 0, "host"), False, SETTINGS)

REQUESTS: tuple[object, ...] = (
    *(
        JoinRequest(MEMBER, 20.0),
        Heartbeat(),
        ProgressRequest(),
        ConfirmRequest(7),
        LeaveRequest(),
        LeaveRequest(True),
        Fail(0, _CAUSE, 3),
        Succeed(0),
        Drain(0),
        RecordProgress(0, 7),
        ReportQuiet(0),
        ReportQuiet(0, False),
    ),
    *(JoinRequest(MEMBER, 20.0, keeps_place=True), NextStore(0, 7001), Fail(0, _CAUSE, 3, True), Heartbeat(2)),
    *(PreemptJob(5.0, "received SIGUSR2"), PreemptJob(5.0, "received SIGUSR2", "n (rank 1)")),
    *(Drain(0, True), Preempt(0, 5.0), Close(), Fail(1, _CAUSE._replace(traceback="x" * 30_000), 9)),
    *(JoinRequest(MEMBER._replace(rank_hint=1, program="y" * 4000), 1.0), Succeed(1)),
    ResumeRequest("before", MEMBER, 0, 0, 2, 0, 1, False, -1, False, "before"),
    ResumeRequest("before", MEMBER, 3, 1, 3, -1, 1, True, 2, True, "before"),
    ResumeRequest("before", MEMBER, 1 << 31, 0, 1, -1, 1 << 40, True, 1 << 31, False, "before"),
    Fail(0, _CAUSE._replace(traceback="x" * 65_000), 3),
    *(NodeReport(0, (7, 8), 100, 2.0, (1.0, -1.0)), CollectedPart(1, b"[]", True), HangReport(1, 0, "two\nlines")),
    *(CauseSought(0), CauseClues(0, (("failed in f (w.py:1)", (0, 1)),))),
)
NOTICES: tuple[object, ...] = (
    Placed(Placement(0, 0, 2, NodeRanks(0, 4, 0, 4), "10.0.0.1", 7000, 1, 0, "before", 3)),
    *(RoundEnded(RoundEnd(0, Reason.FAILURE, "n", _CAUSE, "d", 1, Restarts(1, 3))), NodesWaiting(0, 2, ("n",))),
    *(RoundEnded(RoundEnd(0, Reason.FAILURE, "n", _CAUSE, restarts_workers=True), True), Heartbeat(1 << 40)),
    *(JobEnded(Verdict(Outcome.FAILED, _CAUSE)), JoinRefused(Refusal.TIMEOUT, "d", _PROGRESS), _PROGRESS, Heartbeat()),
    *(
        Preempted(0, "n", 3.0),
        Preempted(0, "n", 3.0, True, "received SIGUSR2"),
        JobEnded(
            Verdict(Outcome.STOPPED, detail="d", ending=Ending.PREEMPTED, delegate=NodeId("10.0.0.1", 7, 0)), True
        ),
        LeaveReply(True, 2),
        Confirmed(7),
        ConfigDiffers("n", (ConfigDifference("--x=", "1", "2"),)),
        SessionEnded("d"),
    ),
    *(
        ReportRequested(),
        CollectRequested(1, CollectKind.STACKS, (0,)),
        DrainRequested("u@h"),
        OperatorAction("u@h", "t"),
    ),
    FaultRequested("u@h", Fault.HANG, 3, 5.0),
    *(HangFound(0, 2), CollectedPart(1, b"[]", True, "n"), CollectionEnded(1, 0, ("n",)), HangReport(1, 0, "r")),
    *(CauseSought(0), CauseClues(0, (("failed in f (w.py:1)", (0, 1)),))),
)
WATCHER_REQUESTS: tuple[object, ...] = (
    *(
        ListRequest(),
        WatchRequest(),
        WatchRequest(7),
        RestartCommand("u@h"),
        DrainCommand("u@h", "n"),
        StopCommand("u@h"),
    ),
    *(ResizeCommand("u@h", 1, 3), CollectCommand("u@h", CollectKind.STACKS, (2,))),
    FaultCommand("u@h", Fault.CUT, -1, "n", 5.0),
)
WATCHER_NOTICES: tuple[object, ...] = (
    *(SnapshotPart(b"x", True), JobList((JobSummary("j", JobPhase.RUNNING, 1, 2, 3),)), CommandReply(False, "d")),
    CollectedPart(1, b"[]", True, "n"),
)
ANSWERS: tuple[object, ...] = (
    *(
        Challenge(b"n" * 16),
        Welcome(3.0, "inc", True),
        HandshakeRefused("no; go away"),
    ),
)
_ALL = (HELLO, Proof(b"p" * 32), *REQUESTS, *NOTICES, *ANSWERS, *WATCHER_REQUESTS, *WATCHER_NOTICES)


@cache
def encoded(messages: tuple[object, ...]) -> tuple[bytes, ...]:
    """The bytes of messages."""
    return tuple(map(codec.encode, messages))


# Frames


def frames(data: bytes) -> None:
    """Any split gives the same frames, or an error, and little is held."""
    step, whole = data[0] % 50 + 1 if data else 1, data[1:]
    found: list[list[bytes]] = []
    for pieces in ([whole], [whole[at : at + step] for at in range(0, len(whole), step)]):
        reader, got = FrameReader(), []
        with suppress(FrameError):
            for piece in pieces:
                got += reader.feed(piece)
            found.append(got)
    assert len(found) < 2 or found[0] == found[1]


def _frame_seeds() -> Sequence[bytes]:
    return [b"\x07" + MAGIC + b"".join(map(frame, encoded(_ALL)[first : first + 3])) for first in range(0, 12, 3)]


# Messages


def messages(data: bytes) -> None:
    """Whatever is decoded can be said again, be shown, and be held; the rest is an error of the codec's."""
    with suppress(codec.CodecError):
        codec.version_of(data)
    decoders: tuple[Callable[[bytes], object], ...] = (
        *(codec.decode_request, codec.decode_notification, codec.decode_answer),
        *(watching.decode_watcher_request, watching.decode_watcher_notification),
        *(lambda each, kind=kind: codec.decode(each, kind) for kind in (Hello, Proof)),
    )
    for decode in decoders:
        try:
            message = decode(data)
        except codec.CodecError:
            continue
        assert decode(codec.encode(message)) == message
        if decode is codec.decode_notification:
            heard(message)  # type: ignore[arg-type]
        elif decode is codec.decode_request:
            _said(message)


_ESCAPE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_SUBJECT = RendezvousName("job", "at host:1")


def heard(notice: Notification) -> None:
    """What a node does with a notice: hold it, and tell people."""
    placed = NOTICES[0]
    assert isinstance(placed, Placed)
    for held in (ResumeState(), ResumeState("i", "i", JoinRequest(MEMBER, 9.0), placed.placement, False)):
        requests_to_repeat(after_notification(held, notice, 4.0), 5.0)
    match notice:
        case Progress():
            shown = waiting_line(_SUBJECT, notice, 1e9) + timeout_sentence(_SUBJECT, notice, 1e9)
        case JoinRefused(progress=Progress() as progress):
            shown = timeout_sentence(_SUBJECT, progress, 1e9)
        case JobEnded(verdict=Verdict(cause=Cause() as cause)) | RoundEnded(end=RoundEnd(cause=Cause() as cause)):
            shown = cause.headline + str(ChildFailedError("x", {}, cause))
        case ConfigDiffers():
            shown = "".join(each.sentence("this node") for each in notice.differences)
        case _:
            shown = str(notice)
    assert _ESCAPE.search(shown) is None, shown


def _said(request: object) -> None:
    held = after_request(ResumeState(), request, 5.0)  # type: ignore[arg-type]
    for again in requests_to_repeat(held, 6.0):
        codec.decode_request(codec.encode(again))


def _message_seeds() -> Sequence[bytes]:
    return encoded(_ALL)


# Snapshots


def snapshots(data: bytes) -> None:
    """What a watcher is shown is one sentence of refusal, or lines and JSON of what can be printed."""
    try:
        seen = decode_snapshot(data)
    except ValueError:
        return
    shown = "\n".join(status_lines(seen, 80))
    assert _ESCAPE.search(shown) is None, shown
    assert _ESCAPE.search(status_json(seen, 1e9)) is None


def stacks(data: bytes) -> None:
    """Stacks of another node are lines, or an error."""
    for read in (decode_stacks, check_stacks):
        with suppress(ValueError):
            lines = stack_lines(read(data))
            assert all(line.isprintable() for line in lines), lines


def evidence(data: bytes) -> None:
    """The evidence of another node is a few lines that can be printed, or an error."""
    for read in (EvidenceReader().read, check_evidence):
        with suppress(ValueError):
            lines = report_lines([read(data)])
            assert all(line.isprintable() for line in lines), lines
            assert len(lines) <= MAX_LINES


def dumps(data: bytes) -> None:
    """What a flight recorder has dumped is a record that travels, and lines that can be printed, or an error."""
    with suppress(ValueError):
        record = record_of(0, read_dump(data))
        node = NodeEvidence("n", (RankEvidence(0, "running"),), records=(record,))
        assert decode_evidence(encode_evidence(node)) == node
        assert all(line.isprintable() for line in report_lines([node]))


_DUMPS = Path(__file__).parents[1] / "unit/hangs/recorded"
_STACKS = b'[[[[0,7],[1,8]],"Thread 1 (active): MainThread\\n  f (a.py:1)",""]]'


_EVIDENCE = encode_evidence(
    NodeEvidence(
        "host",
        (
            RankEvidence(0, "sleeping", where="futex", frames=(Frame("f", "/a/b.py", 1), Frame("g", "<frozen x>"))),
            RankEvidence(1, "ended", 1),
            RankEvidence(2, "in uninterruptible sleep", kernel=("io_schedule",), why_none="not permitted"),
        ),
        "/tmp/hang.0.txt",
    )
)


def _snapshot_seeds() -> Sequence[bytes]:
    made: list[bytes] = []
    dispatcher = Dispatcher(SETTINGS)
    session = dispatcher.attach(lambda _notice: None, SessionRecord(NodeId("h", 1, 0), "h", leased=False))
    watch = JobWatch(dispatcher, lambda notice: made.append(getattr(notice, "data", b"")), lambda _why: None)
    dispatcher.receive(session, JoinRequest(MEMBER, 20.0))
    watch.receive(WatchRequest(after=0))
    dispatcher.receive(session, Fail(0, _CAUSE, 3))
    watch.receive(StopCommand("u@h"))
    watch.receive(WatchRequest())
    return [each for each in made if each]


def worker_logs(data: bytes) -> None:
    """What a node has sent of its workers' output; what that has in it is shown as lines without control characters."""
    with suppress(ValueError):
        found = decode_logs(data)
        lines = [*found.notes, *log_lines(found, "n", labelled=True)]
        assert all(each.replace("\t", "").isprintable() for each in lines)


def bundles(data: bytes) -> None:
    """What another node has collected is files of a bounded size with names of ours, or an error."""
    with suppress(ValueError):
        for piece in decode_bundle(data):
            assert ".." not in piece.name.split("/")


# Signatures


def signatures(data: bytes) -> None:
    """A man in the middle: what is accepted of his frames is what the node has said, in its order, and nothing else."""
    node, coordinator = Signers(b"k" * 32, b"t", node=True), Signers(b"k" * 32, b"t", node=False)
    payloads = encoded(REQUESTS)[:6]
    genuine = [node.outgoing.sign(each) for each in payloads]
    accepted: list[bytes] = []
    at = 0
    while at + 3 <= len(data):
        which, place, change = data[at : at + 3]
        at += 3
        shown = bytearray(genuine[which % 6])
        if which >= 128:
            shown, at = bytearray(data[at : at + place]), at + place
        elif change:
            shown[place % len(shown)] ^= change
        try:
            accepted.append(coordinator.incoming.verify(bytes(shown)))
        except SignatureError:
            break
    assert tuple(accepted) == payloads[: len(accepted)]


# States


def states(data: bytes) -> None:
    """What another has put where the state is kept: a state that can be kept again, or one sentence."""
    for given in (data, _STATES[0][:19] + data):
        with suppress(RendezvousStateError):
            state = decode_state(given)
            assert decode_state(encode_state(state)) == state


def _many_states() -> tuple[bytes, ...]:
    dispatcher = Dispatcher(SETTINGS, restored=RestoredState("0123456789abcdef", State()))
    made = [State(), dispatcher.state]
    for number in range(4):
        session = dispatcher.attach(lambda _notice: None, SessionRecord(NodeId("h", number, 0), "h"))
        dispatcher.receive(session, JoinRequest(MEMBER, 20.0))
        made.append(dispatcher.state)
    dispatcher.receive(1, Fail(0, _CAUSE, 3))
    made.append(dispatcher.state)
    dispatcher.receive(1, Close())
    return tuple(map(encode_state, (*made, dispatcher.state)))


_STATES = _many_states()


TARGETS = {
    "frames": Target(frames, _frame_seeds, ("control/protocol/codec.py",)),
    "messages": Target(messages, _message_seeds, ("control/protocol/codec.py", "control/protocol/validation.py")),
    "snapshots": Target(snapshots, _snapshot_seeds, ("observe/watching/messages.py",)),
    "stacks": Target(
        stacks,
        lambda: [_STACKS, deflated(_STACKS)],
        ("observe/hangs/evidence.py",),
    ),
    "evidence": Target(evidence, lambda: [_EVIDENCE, inflated(_EVIDENCE)], ("observe/hangs/messages.py",)),
    "dumps": Target(
        dumps,
        lambda: [(_DUMPS / "server_3.json").read_bytes()],
        ("observe/hangs/dumps.py",),
    ),
    "worker-logs": Target(
        worker_logs,
        lambda: [encode_logs(NodeLogs((LogPiece(3, b"a\r\x1b[1mb\n"),), ("n",)))],
        ("observe/worker_logs.py",),
    ),
    "bundles": Target(bundles, lambda: [encode_bundle([Piece("a/b.txt", b"x" * 100)])], ("observe/bundle.py",)),
    "signatures": Target(
        signatures, lambda: [b"\0\0\0\1\0\0\2\0\0", b"\0\5\1\0\0\0", b"\x80\4ab"], ("control/protocol/signing.py",)
    ),
    "states": Target(states, lambda: _STATES, ("control/protocol/codec.py",)),
}
