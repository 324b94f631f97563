"""A third host outside the job reaches its control plane, with and without a secret."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest

from rallypoint.base.secrets import Secret, new_secret, token
from rallypoint.control.coordinator.connection import HANDSHAKE_TIMEOUT
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
)
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, FrameReader, frame
from rallypoint.control.protocol.handshake import PROTOCOL_VERSION, Challenge, Hello, Welcome
from rallypoint.control.protocol.messages import (
    Heartbeat,
    JoinRequest,
    LeaveRequest,
    ProgressRequest,
    ResumeRequest,
    SessionEnded,
)
from rallypoint.failures.cause import Cause
from tests.faults.cluster import LEASE, PORT, Agent, Cluster
from tests.faults.intruder import TIMEOUT, Intruder, dial, on
from tests.faults.network import Host, ip
from tests.jobs.launching import RALLYCTL
from tests.processes import completed, resident
from tests.waiting import until

WORD = new_secret()
SECRET = Secret((WORD,))
KEY = SECRET.keys("job")[0]
MEMBER = NodeInfo("default", 1, "10.77.0.9", 7000)
CAUSE = Cause(0, 0, "intruder", 1, 1, "not so", "", 0.0, "")
SETTINGS = Settings("job", 2, 2)
DEEDS = (
    Close(),
    Fail(0, CAUSE, 1),
    Fail(0, CAUSE, 1000),
    Succeed(0),
    Drain(0, needs_consent=True),
    Preempt(0, 1.0),
    LeaveRequest(),
    JoinRequest(MEMBER, 600.0),
    Heartbeat(),
)
"""What members may do: end the job or its round, make it fail, take part."""


class Job(NamedTuple):
    """A job of two nodes on hosts of their own, and the third host."""

    cluster: Cluster
    agents: list[Agent]
    host: Host
    secret: str

    @property
    def control(self) -> tuple[str, int]:
        return self.agents[0].host.address, PORT

    def intruder(self) -> Intruder:
        return Intruder(self.host, self.control)

    def is_as_it_was(self) -> None:
        """Its only round is the first one; a failure of its own is still its first; then it succeeds."""
        assert [len(agent.ups) for agent in self.agents] == [1, 1], [agent.job.err for agent in self.agents]
        self.cluster.say("fail-B-0")
        self.cluster.all_up(self.agents, starts=2)
        assert {agent.ups[-1]["TORCHELASTIC_RESTART_COUNT"] for agent in self.agents} == {"1"}
        self.cluster.finish(self.agents)
        for agent in self.agents:
            assert "\x1b" not in agent.job.err


def started(cluster: Cluster, secret: str, nnodes: str = "2") -> Job:
    cluster.nnodes = nnodes
    env = {"RALLYPOINT_SECRET": secret} if secret else {}
    agents = [cluster.start(name, "--max-restarts=1", env=env) for name in "AB"]
    host = cluster.host("mallory")
    cluster.all_up(agents)
    return Job(cluster, agents, host, secret)


@pytest.fixture(params=["open", "secret"])
def job(request: pytest.FixtureRequest, cluster: Cluster) -> Job:
    return started(cluster, WORD if request.param == "secret" else "")


@pytest.fixture
def secret_job(cluster: Cluster) -> Job:
    return started(cluster, WORD)


@pytest.fixture
def open_job(cluster: Cluster) -> Job:
    return started(cluster, "")


def hello(**changes: object) -> bytes:
    made = Hello(
        PROTOCOL_VERSION, "job", b"n" * 16, "10.77.0.9", NodeId("10.77.0.9", 4711, 0, "intruder"), False, SETTINGS
    )
    return MAGIC + frame(codec.encode(made._replace(**changes)))  # type: ignore[arg-type]


def nonsense() -> Iterator[bytes]:
    """Bytes that nobody of ours sends."""
    chance = random.Random(7)
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500)
    yield chance.randbytes(100_000)
    yield MAGIC + b"\xff\xff\xff\xff" + b"x" * 1000
    yield MAGIC + frame(b"")
    yield MAGIC + frame(b"\xc1" * 60_000)
    yield MAGIC + frame(b"\xdd\xff\xff\xff\xff" * 100)  # an array of four thousand million
    yield MAGIC + frame(b"\x91" * 60_000)  # arrays in arrays
    for _ in range(20):
        yield MAGIC + frame(chance.randbytes(chance.randrange(1, 3000)))
    for number in (float("nan"), float("inf"), 0.0, -1.0, 1e300):
        yield hello(settings=SETTINGS._replace(lease=number))
        yield hello(settings=SETTINGS._replace(join_timeout=number))
    for number in (0, -1, 3_000_000, 2**63 - 1):
        yield hello(settings=SETTINGS._replace(max_nodes=number))
        yield hello(node=NodeId("10.77.0.9", number - 1, 0), settings=SETTINGS._replace(min_nodes=number))
    yield hello(job="j" * 50_000)
    yield hello(job="job\x1b[2J\nE1122 rallypoint: the job is over")
    yield hello(node=NodeId("10.77.0.9", 4711, 0, "\x1b]0;mine\x07" * 100), version=99)
    yield hello(nonce=b"n" * 10_000)


def test_nonsense_costs_log_lines_and_nothing_else(job: Job) -> None:
    before = resident(job.agents[0].job.pid)
    for data in nonsense():
        with job.intruder() as intruder:
            intruder.says(data)
            with contextlib.suppress(OSError):  # it may have been refused already
                intruder.socket.shutdown(socket.SHUT_WR)
            assert intruder.is_disconnected()
    assert resident(job.agents[0].job.pid) - before < 16 << 20
    assert sum("refused" in line for line in job.agents[0].job.err.splitlines()) < 40
    job.is_as_it_was()


def test_without_a_secret_a_host_without_a_node_neither_ends_nor_changes_a_job(open_job: Job) -> None:
    """It may ask for a place, which such a job grants to all."""
    with open_job.intruder() as intruder:
        welcome = intruder.greets(SETTINGS)
        assert isinstance(welcome, Welcome)
    claim = ResumeRequest(welcome.incarnation, MEMBER, 0, 1, 2, origin=welcome.incarnation)
    counts = ResumeRequest(welcome.incarnation, MEMBER, 1000, failures=1000)
    deeds = (*DEEDS[:-3], PreemptJob(1.0, "it says so"), RecordProgress(0, 10**9), claim, counts)
    for message in deeds:
        with open_job.intruder() as intruder:
            assert isinstance(intruder.greets(SETTINGS), Welcome)
            intruder.sends(message)
            if isinstance(message, Close | PreemptJob):
                assert "RALLYPOINT_SECRET_FILE" in codec.decode(intruder.hears() or b"", SessionEnded).detail
                assert intruder.is_disconnected()
            else:
                intruder.sends(ProgressRequest())
                assert intruder.hears() is not None
    with open_job.intruder() as intruder:  # nor does one that waits for a place
        assert isinstance(intruder.greets(SETTINGS), Welcome)
        intruder.sends(JoinRequest(MEMBER, 600.0))
        intruder.sends(Close())
        intruder.sends(ProgressRequest())
        assert intruder.hears() is not None
    open_job.is_as_it_was()


def test_without_a_secret_commands_from_another_host_are_refused(open_job: Job) -> None:
    for verb in (["stop"], ["restart"], ["drain", "B"], ["resize", "1:3"], ["stacks"]):
        asked = [*RALLYCTL, *verb, f"{open_job.control[0]}:{PORT}"]
        done = completed([*open_job.host.entry, *asked])
        assert done.returncode == 1, (verb, done.stdout)
        assert "RALLYPOINT_SECRET_FILE" in done.stderr, (verb, done.stderr)
    open_job.is_as_it_was()


def test_who_has_no_secret_can_do_nothing(secret_job: Job) -> None:
    for message in (*DEEDS, ResumeRequest("", MEMBER)):
        with secret_job.intruder() as intruder:  # in the place of the greeting
            intruder.says(MAGIC)
            intruder.sends(message)
            assert intruder.is_disconnected()
        with secret_job.intruder() as intruder:  # after a greeting without a proof
            intruder.says(hello(has_secret=True))
            assert intruder.hears() is not None
            intruder.sends(message)
            assert intruder.is_disconnected()
    secret_job.is_as_it_was()


def test_who_cannot_prove_the_secret_is_told_so_and_no_more(secret_job: Job) -> None:
    other = Secret((token(SECRET, "another job"),)).keys("job")[0]
    guesses: dict[str, tuple[bytes | None, bytes | None]] = {
        "none": (None, None),
        "another": (b"k" * 32, None),
        "another job's token": (other, None),
        "no proof": (KEY, b""),
        "half a proof": (KEY, b"p" * 16),
        "a long proof": (KEY, b"p" * 200),
    }
    for what, (key, proves) in guesses.items():
        with secret_job.intruder() as intruder:
            refusal = intruder.greets(SETTINGS, key, proves)
            assert isinstance(refusal, str), what
            assert "RALLYPOINT_SECRET" in refusal, (what, refusal)
            for message in DEEDS:
                intruder.sends(message)
            assert intruder.is_disconnected()
    with secret_job.intruder() as intruder:  # and so that the above proves something
        assert isinstance(intruder.greets(SETTINGS, KEY), Welcome)
    secret_job.is_as_it_was()


def test_who_takes_over_the_address_of_the_control_plane_is_not_believed(cluster: Cluster) -> None:
    """Its host is silent and the third one has its address, and welcomes whoever dials. The job survives that."""
    cluster.lease = LEASE  # after which the second node dials again
    secret_job = started(cluster, WORD)
    first, second = secret_job.agents
    mine = ("address", "add", f"{first.host.address}/24", "dev", "eth0")
    with first.host.unplugged():
        ip("-n", secret_job.host.namespace, *mine)
        ip("-n", second.host.namespace, "neighbor", "flush", "dev", "eth0")
        heard = _welcoming_all(secret_job, 3)
        ip("-n", secret_job.host.namespace, mine[0], "del", *mine[2:])
        ip("-n", second.host.namespace, "neighbor", "flush", "dev", "eth0")
    assert KEY not in heard
    assert WORD.encode() not in heard
    assert "10.77.0.99" not in second.job.err
    secret_job.cluster.finish(secret_job.agents)


def _welcoming_all(job: Job, visitors: int) -> bytes:
    """Greet and welcome so many nodes in the control plane's place; returns what they have said."""
    welcome = codec.encode(Welcome(1.0, "server-0"))
    heard = b""
    with on(job.host, lambda: socket.create_server(job.control)) as listener:
        listener.settimeout(TIMEOUT)
        while visitors:
            node, _ = listener.accept()
            with node:
                node.settimeout(TIMEOUT)
                node.sendall(MAGIC + frame(codec.encode(Challenge(b"n" * 16))))
                frames, got = FrameReader(), 0
                while got < 2 and (data := node.recv(65536)):
                    heard += data
                    got += len(frames.feed(data))
                if got == 2:
                    node.sendall(frame(welcome))
                    assert node.recv(1) == b""  # it closes the connection
                    visitors -= 1
    return heard


def test_connections_that_say_nothing_keep_nobody_out(cluster: Cluster) -> None:
    """More than an agent may have open files: a node still comes in, and the next round has its store."""
    cluster.conf = "last_call_timeout=1"
    cluster.within = ["prlimit", "--nofile=1024:1024"]
    job = started(cluster, WORD, "2:3")
    with open_files(4096), ExitStack() as former, ExitStack() as latest:
        since = 0.0

        def dial_many() -> None:
            nonlocal since, former, latest
            since = time.monotonic()
            former.close()
            former, latest = latest, former
            for _ in range(1500):
                latest.enter_context(dial(job.host, job.control))

        def is_in() -> bool:
            if time.monotonic() - since > HANDSHAKE_TIMEOUT / 2:  # before the silent ones are sent away
                dial_many()
            return len(third.ups) == 1

        dial_many()
        third = job.cluster.start("C", "--max-restarts=1", env={"RALLYPOINT_SECRET": WORD})
        until(is_in, "the third node is in")
        cluster.finish([*job.agents, third])


@contextmanager
def open_files(limit: int) -> Iterator[None]:
    """This process may have so many files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
