"""A second user of a node's machine, who can log in there and has nothing to do with the job."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from rallypoint.agent.facts import WorkerFacts
from rallypoint.agent.folder import steps_of_workers
from rallypoint.base.open_process import open_process
from rallypoint.base.pidfds import HAS_PIDFDS
from rallypoint.base.secrets import new_secret
from rallypoint.control.membership.state import Close, Settings
from rallypoint.features.incidents import Incident, flight_recorder_paths, pieces_of
from rallypoint.features.inprocess.channel import WorkerChannel
from rallypoint.features.local_jobs import local_jobs
from rallypoint.observe.watching.messages import StopCommand
from rallypoint.store.server import STORE_VARIABLE
from tests import typed_requests as wire
from tests.environment import JOBS
from tests.faults.intruder import Intruder
from tests.faults.other_user import NOBODY, allowed, as_other_user, openings
from tests.jobs.launching import RALLYCTL, Job, Launcher, launching
from tests.ports import free_port
from tests.processes import below, command_line, completed
from tests.unit.agent.test_incident import node_of
from tests.unit.store.both import KINDS, choose
from tests.waiting import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a second user")

_PTRACE_ATTACH = 16
SCRIPT = """
import os, time
os.write(1, b"up\\n")
while not os.path.exists("finish"):
    time.sleep(0.02)
"""


@pytest.fixture
def rallyrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """A launcher in a folder that the other user can reach: what protects the job is the job's own doing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        if not as_other_user(lambda: os.access(folder, os.R_OK | os.X_OK)):
            pytest.skip(f"TESTS OF OTHER USERS DID NOT RUN: they cannot reach {name}; set TMPDIR to a folder of all")
        former = os.umask(0)
        try:
            with launching(folder) as launcher:
                (folder / "tmp").chmod(0o1777)
                monkeypatch.setenv(JOBS, str(folder / "tmp"))
                yield launcher
        finally:
            os.umask(former)


def running(rallyrun: Launcher, *flags: str, workers: int = 2, env: dict[str, str] | None = None) -> Job:
    """A job whose every part that leaves something on the machine is in use, started without a umask."""
    job = rallyrun(f"--nproc-per-node={workers}", *flags, rallyrun.script(SCRIPT), env=env)
    job.until(lambda lines: sum("up" in line for line in lines) == workers, "all workers up")
    return job


def finish(rallyrun: Launcher, job: Job) -> None:
    (rallyrun.folder / "finish").touch()
    assert job.ends() == 0, job.err


WAYS: list[list[str]] = [
    ["--standalone", "--tee=3"],
    ["--standalone", "--preload=json"],
    ["--standalone", "--run-path", "--start-method=forkserver"],
]


@pytest.mark.parametrize("flags", WAYS, ids=" ".join)
def test_nothing_of_a_job_can_be_reached_by_a_file_or_a_socket(rallyrun: Launcher, flags: list[str]) -> None:
    timers = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    job = running(rallyrun, *flags, env=timers)
    made = sorted((rallyrun.folder / "tmp").iterdir())
    assert made  # else this proves nothing
    for each in made:
        assert openings(each) == [], each
    no_socket_has_a_name(job)
    finish(rallyrun, job)
    for each in made:  # logs stay, as torchrun's do
        if each.exists():
            assert openings(each) == [], each
            shutil.rmtree(each)


def test_no_process_of_a_job_can_be_looked_into_or_touched(rallyrun: Launcher) -> None:
    secret = new_secret()
    job = running(rallyrun, "--standalone", "--preload=json", env={"RALLYPOINT_SECRET": secret})
    libc = ctypes.CDLL(None)

    def attach(pid: int) -> None:
        if libc.ptrace(_PTRACE_ATTACH, pid, 0, 0):
            raise PermissionError

    def deeds(pid: int) -> dict[str, Callable[[], object]]:
        return {
            "read the environment": lambda: Path(f"/proc/{pid}/environ").read_bytes(),
            "read the memory": lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)),
            "see open files": lambda: os.listdir(f"/proc/{pid}/fd"),
            "signal": lambda: os.kill(pid, signal.SIGTERM),
            **({"signal by pidfd": lambda: open_process(pid).send_signal(signal.SIGTERM)} if HAS_PIDFDS else {}),
            "attach": lambda: attach(pid),
        }

    def possible(pid: int) -> list[str]:
        try:
            return [what for what, work in deeds(pid).items() if allowed(work)]
        except FileNotFoundError:  # what makes copies of the zygote ends at once
            return []

    pids = {job.pid, *below(job.pid)}
    for pid in pids:
        assert as_other_user(partial(possible, pid)) == [], command_line(pid)
        assert secret not in command_line(pid)
    assert len(pids & {job.pid, *below(job.pid)}) >= 6, "agent, supervisor, reaper, zygote and workers were looked at"
    finish(rallyrun, job)


def no_socket_has_a_name(job: Job) -> None:
    """Any name would be a way in, through the file system or in the abstract namespace."""
    held = {target for pid in (job.pid, *below(job.pid)) for target in _opened(pid)}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    ours = [row for row in rows if f"socket:[{row[6]}]" in held]
    assert ours  # the connection between agent and reaper
    assert [row for row in ours if len(row) > 7] == []


def _opened(pid: int) -> set[str]:
    """What the descriptors of a process lead to, but for those that are closed meanwhile; none if it has ended."""
    found = set()
    with suppress(FileNotFoundError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found.add(os.readlink(fd))
    return found


@pytest.mark.parametrize(("host", "protected"), [("[::1]", False), ("localhost", False), ("127.0.0.1", True)])
def test_the_control_plane_serves_no_other_user_of_its_machine(rallyrun: Launcher, host: str, protected: bool) -> None:
    """At localhost with two nodes it listens on all interfaces; the other addresses are this machine's alone."""
    port, nodes = free_port(), "1:2"
    env = {"RALLYPOINT_SECRET": new_secret()} if protected else {}
    flags = ["--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}", "--rdzv-id=job", f"--nnodes={nodes}"]
    job = running(rallyrun, *flags, "--rdzv-conf=last_call_timeout=1", workers=1, env=env)
    dialled = host.strip("[]").replace("localhost", "127.0.0.1")
    refusals = as_other_user(partial(attack, (dialled, port)))
    assert all("RALLYPOINT_SECRET" in each for each in refusals), refusals
    assert ("another user" in refusals[0]) is not protected
    finish(rallyrun, job)


def test_the_server_that_a_status_opens_serves_its_user_alone(rallyrun: Launcher) -> None:
    """The coordinator of --standalone has none until its user's first command."""
    job = running(rallyrun, "--standalone", workers=1)
    seen = rallyrun.command([*RALLYCTL, "status", "--json", f"--rdzv-id={_job_of(job)}"])
    assert seen.ends() == 0, seen.err
    ports = {port for _, port in listening(job.pid)}
    refusals = [as_other_user(partial(attack, ("127.0.0.1", port), _job_of(job))) for port in ports]
    assert all(all(each) for each in refusals), "somebody was welcome"
    assert any(all("another user" in each for each in both) for both in refusals), refusals  # others: the store
    finish(rallyrun, job)


def _job_of(job: Job) -> str:
    """The id of a job, once its agent can be asked, which may be after its workers have begun."""
    found: list[str] = []

    def asked() -> bool:
        found[:] = [each.job for each in local_jobs() if each.pid == job.pid]
        return bool(found)

    until(asked, "the agent can be asked")
    return found[0]


def attack(address: tuple[str, int], job: str = "job") -> list[str]:
    """What is answered to a node that would end the job, and to a watcher; empty for a welcome."""
    answers = []
    for watcher in (False, True):
        with Intruder(None, address) as intruder:
            answer = intruder.greets(Settings(job, 1, 2), watcher=watcher)
            answers.append(answer if isinstance(answer, str) else "")
            intruder.sends(StopCommand("mallory") if watcher else Close())
            if not answers[-1]:
                intruder.hears()
    return answers


def listening(pid: int) -> list[tuple[str, int]]:
    """The addresses of IPv4 and IPv6 at which a process listens."""
    inodes = {each.removeprefix("socket:[").rstrip("]") for each in _opened(pid) if each.startswith("socket:")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_worker_store_serves_no_other_user_of_its_machine(
    rallyrun: Launcher, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's clients unpickle some of what is there. The workers, and others of the same user, are served."""
    choose(kind, monkeypatch)
    flags = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job", "--nnodes=1"]
    script = SCRIPT.replace('b"up', 'b"up " + os.environ["MASTER_PORT"].encode() + b"')
    for open_to_all in (False, True):
        (rallyrun.folder / "finish").unlink(missing_ok=True)
        more = ["--store-peers=any"] if open_to_all else []
        job = rallyrun(*flags, *more, rallyrun.script(script), env={STORE_VARIABLE: kind} if kind == "python" else {})
        job.until(lambda lines: any("up " in line for line in lines), "the worker is up")
        port = int(next(line for line in job.out if "up " in line).split()[-1])
        assert as_other_user(partial(keeps, port)) is open_to_all
        assert keeps(port)
        if not open_to_all:
            job.until_err("belongs to another user of this machine")
        finish(rallyrun, job)
        assert ("belongs to another user of this machine" in job.err) is not open_to_all


def keeps(port: int) -> bool:
    """Whether the store at a port stores a value and returns it."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as made:
        with suppress(OSError):
            requests: list[wire.Request] = [wire.Validate(), wire.Set(b"key", b"value"), wire.Get(b"key")]
            made.sendall(b"".join(map(wire.encode, requests)))
            return made.recv(100).endswith(b"value")
        return False


FAKE = {"backend": "c10d", "endpoint": "127.0.0.1:1", "script": "e.py", "began": "1.0", "token": "rpt1-fake"}
HOSTILE: list[dict[str, str]] = [
    {"pid": "9" * 5000},
    {"began": "nan"},
    {"began": "inf"},
    {"began": "-1e300"},
    {"job": "\x1b[2J"},
    {"script": "x" * 20_000},
    {"endpoint": "["},
    {"endpoint": "a.name.that.is.nowhere.invalid:1", "backend": "etcd"},
    {"backend": "no such"},
]
"""Fields that another user may write into a file like that of an agent."""


@contextmanager
def fake_jobs(place: Path, *jobs: dict[str, str]) -> Iterator[int]:
    """Files like those of agents, held by a process of the other user, whose pid they have unless one is given."""
    ready, end = os.pipe(), os.pipe()

    def hold() -> None:
        folder = place / f"rallypoint-{NOBODY}"
        folder.mkdir(0o700)
        network = str(os.stat("/proc/self/ns/net").st_ino)
        held = []
        for number, job in enumerate(jobs):
            fields = {"pid": str(os.getpid()), "job": "fake", **FAKE, "network": network, **job}
            path = folder / f"running-{number}-{number:016x}"
            path.write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
            held.append(path.open())
            fcntl.flock(held[-1], fcntl.LOCK_EX)
        os.mkfifo(folder / f"running-1-{'f' * 16}")
        (folder / f"running-2-{'f' * 16}").symlink_to("/dev/zero")
        os.write(ready[1], str(os.getpid()).encode())
        os.read(end[0], 1)

    def work() -> None:
        try:
            as_other_user(hold)
        finally:
            os.write(ready[1], b"0")  # where it has failed before it was ready

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield int(os.read(ready[0], 20))
    finally:
        os.write(end[1], b"x")
        thread.join()
        shutil.rmtree(place / f"rallypoint-{NOBODY}")
        for fd in (*ready, *end):
            os.close(fd)


def test_no_file_of_another_user_keeps_root_from_its_jobs(rallyrun: Launcher) -> None:
    """It has the same name, or is full of what cannot be, or stands where root's folder is to be."""
    place = rallyrun.folder / "tmp"

    def squat() -> None:
        (place / f"rallypoint-{0}").mkdir(0o700)
        (place / f"rallypoint-{NOBODY - 1}").mkdir(0o700)
        (place / "rallypoint-4294967295").symlink_to("/")

    as_other_user(squat)
    port = free_port()
    where = ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=train"]
    job = running(rallyrun, *where, workers=1, env={"RALLYPOINT_SECRET": new_secret()})
    assert _job_of(job) == "train", "its folder has another name"

    def rallyctl(*words: str) -> Job:
        done = rallyrun.command([*RALLYCTL, *words])
        done.code = done.ends()  # type: ignore[attr-defined]
        assert "Traceback" not in done.err, done.err[-1500:]
        assert "a bug in" not in done.err
        return done

    same = {"job": "train", "endpoint": f"127.0.0.1:{port}", "token": "rpt1-" + "A" * 43}
    with fake_jobs(place, same, {**same, "pid": str(job.pid)}, *HOSTILE) as other:
        shown = json.loads("\n".join(rallyctl("status", "--json").out))["jobs"]
        assert (shown[0]["pid"], shown[0]["phase"]) == (job.pid, "running"), "root's own come first"
        assert {each["pid"] for each in shown[1:]} == {other}, "no process of somebody else is passed for its own"
        assert {each["user"] for each in shown[1:]} == {"nobody"}
        assert all(each["phase"] is None for each in shown[1:])
        refused = rallyctl("stop", "train")
        assert refused.code == 2  # type: ignore[attr-defined]
        assert "'train' matches 2 jobs on this machine; use USER/NAME or the number" in refused.err
        assert "root" in refused.err
        assert "nobody" in refused.err
        assert as_other_user(lambda: {each.user for each in local_jobs()}) == {NOBODY}
        assert "stopping job train" in rallyctl("stop", "root/train").err
    assert job.ends() == 1
    for each in place.glob("rallypoint-*"):
        each.unlink() if each.is_symlink() else shutil.rmtree(each)


def test_a_folder_of_another_user_that_a_program_mounts_is_left_alone(rallyrun: Launcher) -> None:
    """Such a program need not answer."""
    place = rallyrun.folder / "tmp"
    with fake_jobs(place, {}) as other:
        assert [each.pid for each in local_jobs()] == [other]
        folder = place / f"rallypoint-{NOBODY}"
        mounted = completed(["mount", "--bind", str(folder), str(folder)])
        if mounted.returncode:
            pytest.skip(f"A MOUNTED FOLDER WAS NOT TESTED: {mounted.stderr.strip()}")
        try:
            assert list(local_jobs()) == []
        finally:
            completed(["umount", str(folder)], check=True)


def test_a_stopped_agent_delays_no_command(rallyrun: Launcher) -> None:
    first, second = (running(rallyrun, "--standalone", workers=1) for _ in range(2))
    names = {job.pid: _job_of(job) for job in (first, second)}
    first.signal(signal.SIGSTOP)
    try:
        shown = rallyrun.command([*RALLYCTL, "status", "--json"])
        assert shown.ends() == 0
        phases = {each["pid"]: each["phase"] for each in json.loads("\n".join(shown.out))["jobs"]}
        assert phases == {first.pid: None, second.pid: "running"}
        asked = rallyrun.command([*RALLYCTL, "restart", names[second.pid]])
        assert asked.ends() == 0
    finally:
        first.signal(signal.SIGCONT)
    (rallyrun.folder / "finish").touch()
    assert [job.ends() for job in (first, second)] == [0, 0]


def test_traps_where_a_job_will_write_are_not_stepped_into(rallyrun: Launcher) -> None:
    """The other user was first, in a folder that all may write to, and knows what the files will be called."""
    shared = rallyrun.folder / "tmp"
    victim = rallyrun.folder / "victim"
    victim.write_text("precious")
    error_file = shared / "error.json"

    def lay_traps() -> bool:
        for pid in range(os.getpid(), os.getpid() + 200):
            os.symlink(victim, shared / f"error.json.{pid}")
        os.symlink(victim, error_file)
        return True

    assert as_other_user(lay_traps)
    failing = rallyrun.script("raise RuntimeError('it fails')", "failing.py")
    job = rallyrun("--standalone", failing, env={"TORCHELASTIC_ERROR_FILE": str(error_file)})
    assert job.ends() == 1
    assert victim.read_text() == "precious"
    assert not error_file.is_symlink()
    assert "it fails" in error_file.read_text()
    for each in shared.glob("error.json*"):
        each.unlink()
    for each in shared.glob("torchelastic_*"):
        shutil.rmtree(each)


def test_a_folder_of_traps_in_the_place_of_files_is_told_of(rallyrun: Launcher) -> None:
    """Files that a user names and another one has made: a pipe, gigabytes of nothing."""
    shared = rallyrun.folder / "tmp"
    pipe, large = shared / "pipe", shared / "large"

    def lay_traps() -> bool:
        os.mkfifo(pipe, 0o666)
        with open(large, "wb") as file:
            file.truncate(3 << 30)
        os.chmod(large, 0o666)
        return True

    assert as_other_user(lay_traps)
    for path in (pipe, large):
        flags = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={path}"]
        job = rallyrun(*flags, rallyrun.script("print('ran')"))
        assert job.ends() == 1
        assert str(path) in job.err
        assert "Traceback" not in job.err
        flags = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
        refused = rallyrun(*flags, rallyrun.script("print('ran')"), env={"RALLYPOINT_SECRET_FILE": str(path)})
        assert refused.ends() in (1, 2)
        assert "ran" not in refused.out
        path.unlink()


@pytest.mark.parametrize("with_token", [False, True])
def test_what_a_health_port_says_of_the_job_is_for_its_user(rallyrun: Launcher, with_token: bool) -> None:
    """A probe needs a status code; the rest is for the same user, or for those who have the token."""
    port, token_file = free_port(), rallyrun.folder / "token"
    token_file.write_text(f"{new_secret()}\n")
    token_file.chmod(0o600)
    env = {"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)}
    env |= {"RALLYPOINT_HTTP_TOKEN_FILE": str(token_file)} if with_token else {}
    job = running(rallyrun, "--standalone", workers=1, env=env)
    paths = ["/healthz", "/livez", "/readyz", "/status", "/status.json", "/events", "/metrics"]
    probes, rest = [200] * 3, [401 if with_token else 403] * 4
    assert [as_other_user(partial(status_of, port, path)) for path in paths] == [*probes, *rest]
    given = [f"Authorization: Bearer {token_file.read_text().strip()}"] if with_token else []
    assert [status_of(port, path, *given) for path in paths] == [200] * 7
    finish(rallyrun, job)


def test_what_a_control_plane_says_over_http_is_for_its_user(rallyrun: Launcher) -> None:
    port, pages = free_port(), free_port()
    serve = [*RALLYCTL, "serve", f"--endpoint=127.0.0.1:{port}", f"--http={pages}"]
    server = rallyrun.command(serve)
    until(lambda: accepts(pages), "the pages are served")
    for path in ("/status.json", "/events", "/metrics"):
        assert as_other_user(partial(status_of, pages, path)) == 403
        assert status_of(pages, path) == 200
    server.signal(signal.SIGTERM)
    assert server.ends() == 0
    refused = rallyrun.command(
        [*RALLYCTL, "serve", f"--endpoint=127.0.0.1:{port}", f"--http=0.0.0.0:{pages}"],
        env={"RALLYPOINT_SECRET": new_secret()},
    )
    assert refused.ends() == 2
    assert "--http-token-file" in refused.err


def accepts(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


def status_of(port: int, path: str, *headers: str) -> int:
    """The status of the answer to a request."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as made:
        made.sendall("\r\n".join((f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", "")).encode())
        return int(made.recv(100).split()[1])


def test_being_the_other_user_is_real(tmp_path: Path) -> None:
    """If this fails, the tests above prove nothing."""
    tmp_path.chmod(0o700)
    assert as_other_user(os.getuid) == NOBODY
    assert not as_other_user(lambda: allowed(lambda: os.listdir(tmp_path)))


@contextmanager
def planted(rallyrun: Launcher, make: Callable[[Path], object]) -> Iterator[tuple[Path, Path]]:
    """A folder that the other user has made where one of ours will be, with a trap in it, and the file of ours that is
    the trap's victim.
    """
    folder, victim = rallyrun.folder / "tmp" / "rallypoint-notices-known", rallyrun.folder / "victim"
    victim.write_text("precious")

    def plant() -> bool:
        os.mkdir(folder)
        os.chmod(folder, 0o777)
        make(folder)
        return True

    assert as_other_user(plant)
    try:
        yield folder, victim
    finally:
        shutil.rmtree(folder)


def test_a_job_whose_folder_another_user_has_made_is_preempted_without_notice(rallyrun: Launcher) -> None:
    """The whole way: whoever has learned the name plants the folder, and a preemption would be written through it."""
    script = rallyrun.script(
        "import os, signal\nprint('up', os.environ['RALLYPOINT_NOTICES'], flush=True)\nsignal.pause()"
    )
    victim = rallyrun.folder / "victim"
    victim.write_text("precious")
    victim.chmod(0o600)
    job = rallyrun("--standalone", "--preempt-signals=SIGUSR1", "--rdzv-conf=notice_timeout=60", script)
    (line,) = job.until(lambda lines: any("up" in line for line in lines), "a worker is up")
    folder = Path(line.split()[-1])

    def plant() -> None:
        os.mkdir(folder)
        os.chmod(folder, 0o777)
        for name in ("notice.json", "notice.json.new", "progress.0", "inprocess.0"):
            os.symlink(victim, folder / name)

    as_other_user(plant)
    job.signal(signal.SIGUSR1)
    assert job.ends() == 143, job.err
    assert victim.read_text() == "precious"
    assert job.err.count("not a folder that only this user can access") == 1
    assert len(list(folder.iterdir())) == 4, "what is another user's is left alone"
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "work", ["notices.progress(7)", "print(notices.pending())", "notices.acknowledge()", "Channel(sys.argv[1], '0')"]
)
def test_a_worker_uses_no_folder_of_another_user(rallyrun: Launcher, work: str) -> None:
    def trap(folder: Path) -> None:
        for name in ("progress.0", "ack.0.1", ".inprocess.0"):
            os.symlink(folder.parent.parent / "victim", folder / name)
        said = {"reason": "preemption", "node": "", "round": 0, "deadline": 1e9, "number": 1}
        with open(folder / "notice.json", "w", encoding="utf-8") as file:
            json.dump(said, file)

    program = f"import sys\nfrom rallypoint import notices\nfrom rallypoint.inprocess.rounds import Channel\n{work}"
    with planted(rallyrun, trap) as (folder, victim):
        before = sorted(folder.iterdir())
        environment = os.environ | {"RALLYPOINT_NOTICES": str(folder), "LOCAL_RANK": "0"}
        command = [sys.executable, "-c", program, str(folder)]
        done = completed(command, env=environment)
        assert done.stdout in ("", "None\n")
        assert ("PermissionError" in done.stderr) == work.startswith("Channel")
        assert (victim.read_bytes(), sorted(folder.iterdir())) == (b"precious", before)


def test_an_agent_believes_no_file_of_another_user(rallyrun: Launcher) -> None:
    """What says that a worker can go on, that it has left, or how far it is."""

    def trap(folder: Path) -> None:
        os.mkfifo(folder / "inprocess.0", 0o666)
        (folder / "left.0.0").touch()
        (folder / "progress.0").write_bytes(struct.pack("qqqq", 5, time.monotonic_ns(), 5, time.monotonic_ns()))

    with planted(rallyrun, trap) as (folder, _):
        channel = WorkerChannel(str(folder))
        assert (channel.announced(), channel.left(0)) == (set(), set())
        assert not channel.enter(0, 1, {})
        assert steps_of_workers(str(folder), 1) == ()


def test_a_bundle_takes_no_dump_of_another_user_and_follows_no_link(rallyrun: Launcher) -> None:
    def trap(folder: Path) -> None:
        os.symlink(folder.parent.parent / "victim", folder / "nccl_trace_rank_0")
        (folder / "dump_0").write_bytes(b"from another user")

    with planted(rallyrun, trap) as (folder, _):
        for prefix in ("nccl_trace_rank_", "dump_"):
            added = {"TORCH_FR_DUMP_TEMP_FILE": str(folder / prefix)}
            worker = WorkerFacts(0, 0, 1, None, "", "", "", added, lambda: b"")
            facts = node_of(worker)
            pieces = list(pieces_of(facts, Incident(0, "why", "detail", ends_job=False)))
            assert not [each.name for each in pieces if "flight" in each.name]
            assert not any(b"precious" in each.data for each in pieces)
    assert not [path for path in flight_recorder_paths({"HOME": "/home/me"}) if path.startswith("/tmp")]


def test_events_are_not_written_through_a_link_and_are_for_their_owner_alone(rallyrun: Launcher) -> None:
    script = rallyrun.script("print('ran')")
    with planted(rallyrun, lambda folder: os.symlink(folder.parent.parent / "victim", folder / "a")) as (
        folder,
        victim,
    ):
        refused = rallyrun("--standalone", f"--event-log-handler=jsonl:{folder / 'a'}", script)
        assert refused.ends() != 0
        assert "it is a symbolic link" in refused.err
        assert "Traceback" not in refused.err
        assert victim.read_text() == "precious"
        job = rallyrun("--standalone", f"--event-log-handler=jsonl:{folder / 'own'}", script)
        assert job.ends() == 0, job.err
        assert (folder / "own").stat().st_mode & 0o777 == 0o600
