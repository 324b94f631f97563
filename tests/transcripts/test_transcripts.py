"""The transcripts in `coordinator`: `--rewrite-transcripts` rewrites them, and a person reviews the difference.

A transcript is a file of blocks: commands, a line `----`, and their effects. The coordinator is the production one. Its
clock moves only with `wait`.

    job min=2 max=3 last_call=30     a new coordinator (and a new job; notice=, healthy=, backoff=, repeats=, segment=)
    replaced                         a new coordinator without sessions replaces the one before
    open a addr=10.0.0.1             a session for node a
    join a size=2 role=x port=7001 hint=1 timeout=600 domain=rack; keeps: it may be placed again without a join
    next-store a port=7100           a announces its store of the next round
    fail a max=3 restarts            a worker of a failed; restarts: no worker of a can continue in its process
    succeed a | drain a | leave a | end a | inquire a | heartbeat a
    consent a                        agree that the round ends; preempt a in=60; preempt-job a in=60
    progress a step=7 round=0        a's workers reached a step
    holding a                        a opens a session and resumes (over, joining, round=)
    crash a                          the session ends without a leave
    wait 5 b                         five seconds pass, in which b sends heartbeats
    state                            show the state
    wakes                            show when the coordinator wants to be called next
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rallypoint.control.coordinator.coordinator import Coordinator, OutgoingMessage
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import (
    Close,
    Drain,
    Fail,
    NodeId,
    NodeInfo,
    Preempt,
    PreemptJob,
    RecordProgress,
    Settings,
    Succeed,
    join_names,
)
from rallypoint.control.protocol.messages import (
    JobEnded,
    JoinRefused,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    NextStore,
    NodesSucceeded,
    NodesWaiting,
    Notification,
    Placed,
    Placement,
    Preempted,
    Progress,
    ProgressRequest,
    Request,
    ResumeRequest,
    RoundEnded,
)
from rallypoint.failures.cause import Cause
from rallypoint.observe.rendezvous_log import RendezvousName, timeout_sentence, waiting_line

Options = dict[str, str]

_SWITCHES = frozenset({"over", "joining", "keeps", "restarts"})


@dataclass
class Block:
    """Commands and their effects."""

    commands: list[str]
    effects: list[str]


def read(text: str) -> list[Block]:
    """The blocks of a transcript. Comments belong to the commands that follow."""
    blocks = []
    for part in text.strip("\n").split("\n\n"):
        commands, _, effects = part.partition("\n----")
        blocks.append(
            Block(commands.strip("\n").split("\n"), effects.strip("\n").split("\n") if effects.strip() else [])
        )
    return blocks


def write(blocks: list[Block]) -> str:
    """The text of a transcript."""
    return "\n\n".join("\n".join([*block.commands, "----", *block.effects]) for block in blocks) + "\n"


def _join(options: Options, _round: int) -> JoinRequest:
    hint = options.get("hint")
    info = NodeInfo(
        options.get("role", "default"),
        int(options.get("size", 1)),
        options.get("address", ""),
        int(options.get("port", 7000)),
        None if hint is None else int(hint),
        domain=options.get("domain", ""),
    )
    return JoinRequest(info, float(options.get("timeout", 600)), keeps_place="keeps" in options)


def _fail(options: Options, round_: int) -> Fail:
    message = options.get("message", "Signal 9 (SIGKILL)")
    cause = Cause(int(options.get("rank", 0)), 0, options["node"], 42, 1, message, "", 0.0, "")
    return Fail(round_, cause, int(options.get("max", 3)), "restarts" in options)


_REQUESTS: dict[str, Callable[[Options, int], Request]] = {
    "join": _join,
    "next-store": lambda options, round_: NextStore(round_, int(options["port"])),
    "fail": _fail,
    "succeed": lambda _options, round_: Succeed(round_),
    "drain": lambda _options, round_: Drain(round_),
    "consent": lambda _options, round_: Drain(round_, needs_consent=True),
    "preempt": lambda options, round_: Preempt(round_, float(options["in"])),
    "preempt-job": lambda options, _round: PreemptJob(float(options["in"]), "received SIGUSR2"),
    "progress": lambda options, round_: RecordProgress(round_, int(options["step"])),
    "leave": lambda options, _round: LeaveRequest("asks" in options, ended_with_0="ended_with_0" in options),
    "end": lambda _options, _round: Close(),
    "inquire": lambda _options, _round: ProgressRequest(),
}


class Player:
    """A coordinator, and the names of its sessions."""

    def __init__(self) -> None:
        self.now = 100.0
        self.coordinator = Coordinator(Settings("transcript", 1, 1), "0")
        self.names: dict[int, str] = {}
        self.places: dict[str, tuple[str, Placement | None]] = {}
        self.succeeded: dict[str, tuple[tuple[int, int], ...]] = {}
        """The reported successes of the others, by node."""
        self.incarnations = 0
        self.sessions = 0

    def play(self, command: str) -> list[str]:
        """Run a command. Returns its effects as lines."""
        if not command or command.startswith("#"):
            return []
        verb, *words = command.split()
        options = dict(word.split("=") for word in words if "=" in word)
        options |= dict.fromkeys(_SWITCHES.intersection(words), "yes")
        names = [word for word in words if "=" not in word and word not in _SWITCHES]
        if verb not in _REQUESTS:
            return self._VERBS[verb](self, names, options)

        def request(name: str) -> Request:
            round_ = int(options.get("round", self.coordinator.state.round))
            return _REQUESTS[verb](options | {"node": name}, round_)

        return self._say(names, request)

    def _job(self, _names: list[str], options: Options) -> list[str]:
        self.names = {}
        low = int(options["min"])
        self.coordinator = Coordinator(
            Settings(
                "transcript",
                low,
                int(options.get("max", low)),
                last_call_timeout=float(options.get("last_call", 30)),
                join_timeout=float(options.get("join", 600)),
                lease=float(options.get("lease", 3)),
                fixed_ranks="fixed" in options,
                notice_timeout=float(options.get("notice", 0)),
                min_healthy_time=float(options.get("healthy", 60)),
                restart_backoff=float(options.get("backoff", 0)),
                same_failure_limit=int(options.get("repeats", 0)),
                segment=int(options.get("segment", 1)),
            ),
            "0",
        )
        return []

    def _replaced(self, _names: list[str], _options: Options) -> list[str]:
        self.names = {}
        self.incarnations += 1
        self.coordinator = Coordinator(self.coordinator.settings, str(self.incarnations))
        return []

    def _open(self, names: list[str], options: Options) -> list[str]:
        for name in names:
            self.sessions += 1
            session = self.sessions
            self.names[session] = name
            address = options.get("addr", f"host-{name}")
            self.coordinator.open(
                session,
                SessionRecord(
                    NodeId(address, 1, 0),
                    address,
                    server_address=options.get("server", ""),
                    leased="local" not in options,
                    in_this_process="local" in options,
                    local="local" in options,
                ),
                self.now,
            )
            if name not in self.places:
                self.places[name] = (self.coordinator.incarnation, None)
        return []

    def _holding(self, names: list[str], options: Options) -> list[str]:
        lines = []
        for name in names:
            known = self.places[name]
            self._open([name], options)
            held = self._held(known, self.succeeded.get(name, ()), options)
            lines += self._show(self.coordinator.receive(self._session(name), held, self.now).messages)
            self.places[name] = (self.coordinator.incarnation, known[1])
        return lines

    def _held(
        self, known: tuple[str, Placement | None], succeeded: tuple[tuple[int, int], ...], options: Options
    ) -> ResumeRequest:
        incarnation, place = known
        member = NodeInfo("default", 1, "", 7000)
        if place is None:
            return ResumeRequest(incarnation, member, joining="joining" in options)
        return ResumeRequest(
            incarnation,
            member,
            int(options.get("round", place.round)),
            place.group_rank,
            place.group_world_size,
            place.control_rank,
            int(options.get("failures", place.restarts)),
            "over" in options,
            joining="joining" in options,
            succeeded=succeeded,
        )

    def _heartbeat(self, names: list[str], _options: Options) -> list[str]:
        for name in names:
            self.coordinator.heartbeat(self._session(name), self.now)
        return []

    def _crash(self, names: list[str], _options: Options) -> list[str]:
        sends: list[OutgoingMessage] = []
        for name in names:
            session = self._session(name)
            del self.names[session]
            sends += self.coordinator.close(session, self.now).messages
        return self._show(sends)

    def _wait(self, names: list[str], _options: Options) -> list[str]:
        """Let time pass, with a tick whenever one is due, as a shell does."""
        until = self.now + float(names[0])
        beat_at = self.now if names[1:] else math.inf
        sends: list[OutgoingMessage] = []
        while (at := min(self.coordinator.wake_at(), beat_at)) <= until:
            self.now = max(self.now, at)
            if at == beat_at:
                self._heartbeat(names[1:], {})
                beat_at += 1.0
            else:
                sends += self.coordinator.tick(self.now).messages
        self.now = until
        return self._show(sends)

    def _state(self, _names: list[str], _options: Options) -> list[str]:
        state = self.coordinator.state
        lines = [
            f"round {state.round} {'complete' if state.complete else 'forming'}{' closed' if state.closed else ''}"
        ]
        lines += [
            f"  participant {node.addr or 'absent'} rank {each.rank}"
            for node, each in sorted(state.participants.items())
        ]
        lines += [f"  waits {node.addr}" for node in sorted(state.wait_list)]
        lines += [f"  spare {node.addr}" for node in sorted(state.redundancy_list)]
        lines += [f"  awaited {node.addr or 'absent'} rank {rank}" for node, rank in sorted(state.survivors.items())]
        ledger = state.ledger
        lines += [
            f"  ledger failures={ledger.failures} lost={ledger.lost} "
            f"departed={ledger.departed} drained={ledger.drained}"
        ]
        return lines

    def _wakes(self, _names: list[str], _options: Options) -> list[str]:
        return [f"wakes in {self.coordinator.wake_at() - self.now:g} s"]

    _VERBS: dict[str, Callable[[Player, list[str], Options], list[str]]] = {  # noqa: RUF012
        "job": _job,
        "replaced": _replaced,
        "holding": _holding,
        "open": _open,
        "heartbeat": _heartbeat,
        "crash": _crash,
        "wait": _wait,
        "state": _state,
        "wakes": _wakes,
    }

    def _say(self, names: list[str], request: Callable[[str], Request]) -> list[str]:
        sends: list[OutgoingMessage] = []
        for name in names:
            sends += self.coordinator.receive(self._session(name), request(name), self.now).messages
        return self._show(sends)

    def _session(self, name: str) -> int:
        return max(number for number, each in self.names.items() if each == name)

    def _show(self, sends: list[OutgoingMessage]) -> list[str]:
        for session, notice in sends:
            if isinstance(notice, Placed) and session in self.names:
                name = self.names[session]
                self.places[name] = (self.places[name][0], notice.placement)
                self.succeeded.pop(name, None)
            elif isinstance(notice, NodesSucceeded) and session in self.names:
                self.succeeded[self.names[session]] = notice.succeeded
        return [f"{self.names[session]} <- {shown(notice)}" for session, notice in sends if session in self.names]


def in_words_of(wording: Callable[[RendezvousName, Progress, float], str], progress: Progress) -> str:
    """The sentence for a progress. Removed nodes are named without the time of day."""
    gone = "".join(
        f"; {each.name}: {each.reason.value} {each.seconds_ago:g} s ago{' (ended with 0)' if each.ended_with_0 else ''}"
        for each in progress.removed
    )
    return wording(RendezvousName("transcript", ""), progress._replace(removed=()), 0.0) + gone


def shown(notice: Notification) -> str:
    """A notice in a few words."""
    match notice:
        case Placed(placement=p):
            ranks = p.ranks
            return (
                f"placed round={p.round} group_rank={p.group_rank}/{p.group_world_size} "
                f"ranks={ranks.base_rank}+/{ranks.world_size} "
                f"role_ranks={ranks.base_role_rank}+/{ranks.role_world_size} "
                f"store={p.store_address}:{p.store_port} restarts={p.restarts}"
                + (f" progress={p.progress}" if p.progress >= 0 else "")
            )
        case RoundEnded(end=end, keeps_place=kept):
            more = ": ".join(each for each in (end.node, end.detail) if each)
            restart = f", restart {end.restarts}" if end.restarts.allowed else ""
            held = f", held back {end.held_back:g} s" if end.held_back else ""
            then = restart + held + (", keeps its place" if kept else "")
            return f"round {end.round} ended: {end.reason.value}" + (f" ({more})" if more else "") + then
        case NodesWaiting(round=round_, waiting=waiting, names=names):
            return f"{waiting} waiting for a round after {round_}" + (f" ({join_names(names)})" if names else "")
        case NodesSucceeded(round=round_, succeeded=succeeded):
            nodes = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in succeeded)
            return f"succeeded in round {round_}: node {nodes}"
        case JobEnded(verdict=verdict, is_delegate=is_delegate, is_spare=is_spare):
            why = f" ({verdict.detail})" if verdict.detail else ""
            why += f", restarts {verdict.restarts}" if verdict.restarts.allowed else ""
            why += ", this node for all" if is_delegate else ", this spare was not needed" if is_spare else ""
            return f"job {verdict.outcome.value}" + (f": {verdict.cause.message}" if verdict.cause else "") + why
        case JoinRefused(refusal=refusal, detail=detail, progress=progress):
            return (
                f"refused, {refusal.value}: {detail if progress is None else in_words_of(timeout_sentence, progress)}"
            )
        case Progress():
            return in_words_of(waiting_line, notice) + ("" if notice.reports else " (another tells)")
        case Preempted(seconds=seconds, node=node, whole_job=True, why=why):
            return f"{node} {why}; the job ends in {seconds:g} s"
        case Preempted(round=round_, node=node, seconds=seconds):
            return f"{node} will be gone in {seconds:g} s; round {round_} is to end before"
        case LeaveReply(goes_on=goes_on, others=others, outcome=outcome):
            ended = "" if outcome is None else f", it has {outcome.value}"
            return f"the job {'goes on' if goes_on else 'does not go on'}, others: {others}{ended}"
        case _:
            return repr(notice)


TRANSCRIPTS = sorted((Path(__file__).parent / "coordinator").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    blocks = read(path.read_text())
    player = Player()
    for block in blocks:
        block.effects = [line for command in block.commands for line in player.play(command)]
    if request.config.getoption("--rewrite-transcripts"):
        path.write_text(write(blocks))
    assert write(blocks) == path.read_text()
