"""Saves this node's information about a failure in a folder, for later inspection (`--incident-dir`, `rallyctl
bundle`).

Laws:

1. Nothing here runs or is imported unless a folder is set or an operator asks.
2. The agent's loop never waits for it: each incident has its own thread. When the run ends, it waits at most `_FINISH`
   seconds for them.
3. Collect stacks and the state of the GPUs immediately, before SIGTERM ends the workers. Read output after they have
   ended.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata

from rallypoint.agent.facts import NodeFacts, WorkerFacts
from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.policy import STARTED, Phase, PolicyState
from rallypoint.agent.steps import WorkersStarted
from rallypoint.base.clock import Deadline
from rallypoint.base.kernel import readable
from rallypoint.base.light_typing import TYPE_CHECKING, Any, NamedTuple
from rallypoint.base.log import get_logger
from rallypoint.base.private_files import open_regular
from rallypoint.base.process_table import read_stat
from rallypoint.base.side_thread import SideThread, start_thread
from rallypoint.control.membership.state import Outcome, Reason, Refusal, Verdict
from rallypoint.control.protocol.messages import (
    CollectKind,
    CollectRequested,
    JobEnded,
    JoinRefused,
    LinkLost,
    RoundEnded,
)
from rallypoint.failures.cause import Ending
from rallypoint.failures.report import failure_detail
from rallypoint.features.collecting import start_collecting
from rallypoint.observe.bundle import (
    LIMIT,
    ON_DEMAND_LIMIT,
    Piece,
    bundle,
    encode_bundle,
    helpful_variables,
    mask_command,
    mask_environment,
    mask_strings,
    mask_text,
    safe_name,
    write_bundle,
    write_index,
)
from rallypoint.observe.hangs.dumps import DUMP, OLD_NAMES

if TYPE_CHECKING:
    from rallypoint.agent.steps import Event, Step
    from rallypoint.agent.workers import WorkerController
    from rallypoint.base.process_table import ProcessStat
    from rallypoint.failures.cause import Cause
    from rallypoint.observe.watching.messages import Snapshot

log = get_logger(__name__)

LINES = 1000
"""Maximum number of lines saved per output of a worker."""
_MOST_READ = 512 * 1024
"""Maximum number of bytes saved per output."""
_LARGEST_RECORD = 8 * 1024 * 1024
"""Maximum size of a flight recorder's file in bytes."""
_SMI_TIMEOUT = 10.0
_LARGEST_STATE = 512 * 1024
"""Maximum number of bytes saved of nvidia-smi's output, which is about 100 KiB for eight GPUs."""

MORE_VARIABLES = "RALLYPOINT_INCIDENT_ENV"
"""Lists more variables to show in a bundle."""
_PACKAGES = ("rallypoint", "torch", "numpy", "msgspec", "uvloop", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_DEFAULT_RECORDER = "torch/comm_lib_trace_rank_"
"""Where torch dumps by default, below the user's cache. Older versions used /tmp, where any user may put files."""
_KERNEL = re.compile(
    r"out of memory|oom-kill|oom_reaper|killed process|segfault|NVRM|\bXid\b|hung_task|blocked for more"
)


class Incident(NamedTuple):
    """A failure of the job, as reported to this node. `ends_job`: no restart follows."""

    round: int
    why: str
    detail: str
    ends_job: bool
    cause: Cause | None = None

    @property
    def headline(self) -> str:
        """A one-line summary."""
        return self.cause.headline if self.cause is not None else self.detail


class IncidentFacts(NamedTuple):
    """This node and its running processes, by rank: unlike pids, these entries never refer to other processes.

    Standby workers have no rank; they get negative numbers.
    """

    node: NodeFacts
    running: Mapping[int, ProcessStat]


def incident_facts(workers: WorkerController) -> IncidentFacts:
    """The current facts. Call on the loop's thread."""
    node = workers.look()
    found = {worker.rank: read_stat(worker.pid) for worker in node.processes if worker.exit_code is None}
    found |= {-number: read_stat(process.pid) for number, process in enumerate(node.waiting, 1)}
    return IncidentFacts(node, {rank: process for rank, process in found.items() if process is not None})


_ENDED = 12.0
"""Seconds to wait for workers to end before reading their output anyway."""
_FINISH = 20.0
"""Seconds to wait for unfinished incidents when the run ends."""
_STACKS_FIRST = 0.5
"""Seconds that stopping the workers waits until their stacks are read, which takes milliseconds."""
MAX_KEPT = 20
"""Maximum number of bundles per agent. The first are kept, since later failures are mostly repetitions."""


def incident_of(event: Event, state: PolicyState) -> Incident | None:
    """The failure in an event of the agent's loop, given the state before it; None for other events."""
    rule = _RULES.get(type(event))
    return None if rule is None else rule(event, state)


def _of_round_end(event: RoundEnded, state: PolicyState) -> Incident | None:
    end = event.end
    if end.reason not in {Reason.FAILURE, Reason.LOST} or state.phase not in STARTED or end.round != state.round:
        return None
    return Incident(end.round, end.reason.value, f"{end.node}: {end.detail}".strip(": "), False, end.cause)


def _of_job_end(event: JobEnded, state: PolicyState) -> Incident | None:
    verdict: Verdict = event.verdict
    if verdict.outcome is not Outcome.FAILED:
        return None
    why = verdict.ending if verdict.ending is not Ending.PROGRAM else Reason.FAILURE
    return Incident(state.round, why.value, verdict.detail, True, verdict.cause)


def _of_refusal(event: JoinRefused, state: PolicyState) -> Incident | None:
    if state.phase is not Phase.FORMING or event.refusal is not Refusal.TIMEOUT:
        return None
    return Incident(state.round, "the rendezvous timed out", event.detail, True)


def _of_lost_link(event: LinkLost, state: PolicyState) -> Incident | None:
    if state.phase in {Phase.FINISHED, Phase.ENDING, Phase.LEAVING, Phase.ENDED}:
        return None
    failure = state.failure or (state.held_failure and state.held_failure.cause)
    return Incident(state.round, "the control plane was lost", event.detail, True, failure or None)


_RULES: Mapping[type, Callable[..., Incident | None]] = {
    RoundEnded: _of_round_end,
    JobEnded: _of_job_end,
    JoinRefused: _of_refusal,
    LinkLost: _of_lost_link,
}


class IncidentRecorder:
    """Saves the incidents of one agent's run.

    Args:
        folder: the folder to write to; created if missing.
        facts: returns the current facts about this node and its workers; called on the loop's thread.
        snapshot: see `RendezvousClient.snapshot`; called on the loop's thread.
    """

    def __init__(
        self,
        folder: str,
        facts: Callable[[], IncidentFacts],
        snapshot: Callable[[], Callable[[], Snapshot] | None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._facts = facts
        self._snapshot = snapshot
        # Start it now: that no thread is free is a common cause of failures.
        self._recorder = SideThread("incident", _failed)
        self._recorder.start()
        self._threads: list[threading.Thread] = []
        """Threads of unfinished incidents."""
        self._count = 0

    def observe(self, before: PolicyState, event: Event | None, _after: PolicyState, _steps: tuple[Step, ...]) -> None:
        """An `Observer`: start a bundle if the event is a failure. The next steps stop the workers, so return only once
        their stacks are read, or after `_STACKS_FIRST`.
        """
        incident = None if event is None else incident_of(event, before)
        if incident is None:
            return
        self._count += 1
        if self._count > MAX_KEPT:
            if self._count == MAX_KEPT + 1:
                log.warning("this agent has saved %d incidents and will not save any more", MAX_KEPT)
            return
        # Take the job's state now, not after a thread has read the stacks:
        #   1. node B fails for the last time, and the coordinator, in this agent A, ends the job;
        #   2. B ends its workers, writes its bundle and leaves, while our thread still reads stacks;
        #   3. the index of the bundles would not name B's bundle, the one that matters.
        facts, make_snapshot = self._facts(), self._snapshot()
        stacks_read = threading.Event()
        keep = partial(self._keep, incident, facts, make_snapshot, stacks_read)
        thread = None
        if not self._recorder.is_idle:  # read the stacks before the workers stop
            thread = start_thread(keep, "incident")
        if thread is None:
            self._recorder.post("incident", keep)
        else:
            self._threads.append(thread)
        stacks_read.wait(_STACKS_FIRST)

    def make_ready(self) -> None:
        """Import the modules for a snapshot while nobody waits: an incident is observed before it is announced."""

        def import_all() -> None:
            import rallypoint.observe.hangs.evidence
            import rallypoint.observe.hangs.report
            import rallypoint.observe.watching.watchers  # noqa: F401

        self._recorder.post("imports", import_all)

    def close(self) -> None:
        """Wait for unfinished incidents."""
        deadline = Deadline.after(_FINISH)
        self._recorder.close(deadline.remaining())
        for thread in self._threads:
            thread.join(deadline.remaining())
        if self._recorder.busy_for() or any(thread.is_alive() for thread in self._threads):
            log.warning("the evidence of a failure could not be collected within %g s", _FINISH)

    def _keep(
        self,
        incident: Incident,
        facts: IncidentFacts,
        make_snapshot: Callable[[], Snapshot] | None,
        stacks_read: threading.Event,
    ) -> None:
        try:
            try:
                stacks = stack_pieces(facts)
            finally:
                stacks_read.set()
            parent = os.path.join(self._folder, safe_name(facts.node.job), f"round-{max(incident.round, 0)}")
            early = [*stacks, *gpu_pieces()]
            if make_snapshot is not None:  # this agent has the coordinator: write the job's state on all nodes
                seen = make_snapshot()
                write_index(parent, index_fields(seen, incident.why, incident.headline, facts.node.host))
            _until_ended(facts)
            pieces = bundle(summary_of(incident, facts.node), [*early, *pieces_of(facts.node, incident)], LIMIT)
            path = write_bundle(parent, f"{safe_name(facts.node.host)}-{facts.node.pid}", pieces)
        except OSError as error:
            log.error("the evidence of this failure cannot be saved in %s: %s", self._folder, error.strerror or error)
        except Exception:
            log.exception(
                "the evidence of this failure could not be saved; this is a bug in Rallypoint (please report it)"
            )
        else:
            log.warning("this node's evidence of the failure is in %s", os.path.abspath(path))


def _failed(_what: str) -> None:
    log.exception("the evidence of a failure could not be saved; this is a bug in Rallypoint (please report it)")


class Incidents(Feature):
    """Saves the incidents of one agent in its folder, and sends bundles to operators on request."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        workers, folder = self.workers, self.workers.group.spec.features.output.incident_dir
        self._recorder: IncidentRecorder | None = None
        if folder:
            self._recorder = IncidentRecorder(folder, lambda: incident_facts(workers), workers.rendezvous.snapshot)

    def messages(self) -> Mapping[type, Callable[[Any], None]]:
        return {CollectRequested: self._collect, WorkersStarted: self._on_workers_started}

    def _on_workers_started(self, _event: WorkersStarted) -> None:
        if self._recorder is not None and self.workers.rendezvous.hosts_coordinator:
            self._recorder.make_ready()

    def observe(self, before: PolicyState, event: Event | None, after: PolicyState, steps: tuple[Step, ...]) -> None:
        if self._recorder is not None:
            self._recorder.observe(before, event, after, steps)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def _collect(self, request: CollectRequested) -> None:
        if request.kind is CollectKind.BUNDLE:
            facts = incident_facts(self.workers)
            start_collecting(request, lambda: encode_bundle(demand(facts)), self.workers.rendezvous.send)


def _until_ended(facts: IncidentFacts) -> None:
    """Wait until the workers have ended, at most for their grace period."""
    from rallypoint.workers.stop import open_found

    until = time.monotonic() + _ENDED
    for process in (process for rank, process in facts.running.items() if rank >= 0):  # standby workers continue
        handle = open_found(process)
        if handle is None:  # the process has ended; its pid may be reused
            continue
        try:
            readable(handle.fileno(), max(0.0, until - time.monotonic()))
        finally:
            handle.close()


def demand(facts: IncidentFacts) -> tuple[Piece, ...]:
    """The bundle that an operator requested: a smaller one, of a node whose workers run."""
    asked = Incident(facts.node.round, "requested by an operator", "", False)
    pieces = [*stack_pieces(facts), *gpu_pieces(), *pieces_of(facts.node, asked)]
    return bundle(summary_of(asked, facts.node), pieces, ON_DEMAND_LIMIT)


# The files in a bundle


def summary_of(incident: Incident, facts: NodeFacts) -> dict[str, Any]:
    """The fields of `incident.json`, except those that the bundle adds."""
    cause = incident.cause
    return {
        "job": facts.job,
        "round": incident.round,
        "at": time.time(),
        "why": incident.why,
        "headline": mask_text(incident.headline),
        "detail": mask_text(incident.detail),
        "ends_job": incident.ends_job,
        "cause": None if cause is None else mask_strings({**cause._asdict(), "traceback": "see failure.txt"}),
        "node": {
            "host": facts.host,
            "pid": facts.pid,
            "role": facts.role,
            "group_rank": facts.group_rank,
            "group_world_size": facts.group_world_size,
            "ranks": [worker.rank for worker in facts.processes],
            "pids": [worker.pid for worker in facts.processes],
            "standby": [process._asdict() for process in facts.waiting],
        },
        "restarts_used": facts.restarts,
        "program": facts.program,
        "command": mask_command(sys.orig_argv),
        "working_folder": _quietly(os.getcwd, ""),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    system = os.uname()
    found = {"python": sys.version.split()[0], "kernel": f"{system.sysname} {system.release} {system.machine}"}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    driver = _read("/proc/driver/nvidia/version", 4096).decode(errors="replace").partition("\n")[0]
    return {**found, "nvidia driver": driver} if driver else found


def stack_pieces(facts: IncidentFacts) -> list[Piece]:
    """The running workers' Python stacks, if readable."""
    from rallypoint.observe.hangs.evidence import stacks_of_workers
    from rallypoint.observe.hangs.report import stack_lines

    pids = {rank: process.pid for rank, process in facts.running.items() if process.is_running()}
    if not pids:
        return []
    text = "\n".join(stack_lines(stacks_of_workers(pids)))
    return [Piece("stacks.txt", f"{mask_text(text)}\n".encode(errors="replace"))]


def gpu_pieces() -> list[Piece]:
    """nvidia-smi's output for all GPUs; empty without nvidia-smi or without space for a temporary file."""
    import tempfile

    try:
        with tempfile.TemporaryFile() as out:
            smi = subprocess.Popen(["nvidia-smi", "-q"], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            try:
                smi.wait(_SMI_TIMEOUT)
            except subprocess.TimeoutExpired:
                smi.kill()
                with suppress(subprocess.TimeoutExpired):  # a hung driver can keep even a killed process alive
                    smi.wait(1.0)
                text = f"nvidia-smi did not answer within {_SMI_TIMEOUT:g} s; check the kernel log\n"
                return [Piece("nvidia-smi.txt", text.encode())]
            out.seek(0)
            return [Piece("nvidia-smi.txt", _masked(out.read(_LARGEST_STATE)))]
    except OSError:
        return []


def pieces_of(facts: NodeFacts, incident: Incident) -> Iterator[Piece]:
    """The other files, most important first."""
    if incident.cause is not None:
        text = f"{incident.cause.headline}\n\n{failure_detail(incident.cause)}\n"
        yield Piece("failure.txt", mask_text(text).encode())
    yield Piece("system.txt", mask_text(_system(facts)).encode(errors="replace"))
    yield Piece("environment.txt", _environment(facts).encode(errors="replace"))
    for worker in facts.processes:
        yield from _outputs(worker)
    yield from _flight_records(facts)


def _outputs(worker: WorkerFacts) -> Iterator[Piece]:
    folder = f"workers/rank_{worker.rank}"
    for name, path in (("stdout.txt", worker.stdout), ("stderr.txt", worker.stderr)):
        data = last_lines(_read_end(path)) if path and path != os.devnull else b""
        if not data and name == "stderr.txt":
            data = last_lines(_quietly(worker.last_lines, b""))
        if data:
            yield Piece(f"{folder}/{name}", _masked(data))
    if error := _read_end(worker.error_file):
        yield Piece(f"{folder}/error.json", _masked(error))


def _masked(data: bytes) -> bytes:
    return mask_text(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def last_lines(data: bytes, count: int = LINES) -> bytes:
    """The last `count` lines of a text."""
    ended = data.endswith(b"\n")
    lines = (data[:-1] if ended else data).split(b"\n")
    return b"\n".join(lines[-count:]) + (b"\n" if ended else b"") if data else b""


def _environment(facts: NodeFacts) -> str:
    more = os.environ.get(MORE_VARIABLES, "").split(",")

    def lines(environ: Mapping[str, str]) -> list[str]:
        helpful = helpful_variables(environ, more)
        return [f"{name}={value!r}" for name, value in mask_environment(helpful).items()]

    shown = lines(os.environ)
    for worker in facts.processes:
        shown += ["", f"# beyond that, rank {worker.rank}:", *lines(worker.added)]
    head = (
        f"# of the agent, secrets masked; variables that help to understand a failure, and those of {MORE_VARIABLES}:"
    )
    return "\n".join([head, *shown, ""])


# Kernel log


def _system(facts: NodeFacts) -> str:
    parts = ["# how workers ended, as far as known"]
    for rank, failure in sorted(facts.failures.items()):
        parts.append(f"rank {rank} (pid {failure.pid}), exit code {failure.exitcode}: {failure.text}")
        parts += [failure.context] if failure.context else []
    words = kernel_words(_kernel_log(), {worker.pid for worker in facts.processes})
    parts += ["", "# the kernel's log, where it may be read: of these processes, of memory, of GPUs", *words]
    for path in (
        "/proc/meminfo",
        "/proc/loadavg",
        *(f"/proc/pressure/{resource}" for resource in ("cpu", "memory", "io")),
    ):
        if text := _read(path, 4096).decode(errors="replace"):
            parts += ["", f"# {path}", "\n".join(text.splitlines()[:12])]
    group = _own_group()
    for name in ("memory.events", "memory.max", "memory.current", "pids.max", "pids.current") if group else ():
        if text := _read(f"{group}/{name}", 4096).decode(errors="replace"):
            parts += ["", f"# {group}/{name}", text.rstrip()]
    return "\n".join([*parts, ""])


def kernel_words(lines: Sequence[str], pids: set[int]) -> list[str]:
    """Lines in the kernel's log that name one of these processes, or report that a process was killed."""
    named = re.compile(rf"(?<!\d)(?:{'|'.join(map(str, sorted(pids)))})(?!\d)") if pids else None
    return [line for line in lines if _KERNEL.search(line) or (named is not None and named.search(line))][-200:]


def _kernel_log() -> list[str]:
    """The kernel's log, without priorities; empty if unreadable."""
    from rallypoint.failures.failure import log_entries, raw_entries

    try:
        return [f"[{entry.moment:.3f}] {entry.text}" for entry in log_entries(raw_entries())]
    except OSError:
        return []


def _own_group() -> str:
    for line in _read("/proc/self/cgroup", 4096).decode(errors="replace").splitlines():
        if line.startswith("0::"):
            path = f"/sys/fs/cgroup{line[3:].rstrip('/')}"
            return path if os.path.exists(f"{path}/memory.events") else "/sys/fs/cgroup"
    return ""


# The flight recorder of torch's process groups


def _flight_records(facts: NodeFacts) -> Iterator[Piece]:
    for worker in facts.processes:
        for start in flight_recorder_paths({**os.environ, **worker.added}):
            path = f"{start}{worker.rank}"
            with suppress(OSError), open(open_regular(path), "rb") as file:
                seen = os.fstat(file.fileno())
                if seen.st_mtime < facts.since or seen.st_uid != os.geteuid():
                    continue  # from another run or another user
                if seen.st_size <= _LARGEST_RECORD and (data := file.read(_LARGEST_RECORD)):
                    yield Piece(f"flight_recorder/rank_{worker.rank}", data, is_whole=True)
                break


def flight_recorder_paths(environ: Mapping[str, str]) -> list[str]:
    """Prefixes of the paths of dumps, according to a worker's environment."""
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/"), ".cache")
    given = (environ[name] for name in (DUMP, OLD_NAMES[DUMP]) if environ.get(name))
    return [*given, os.path.join(cache, _DEFAULT_RECORDER)]


# The index


def index_fields(seen: Snapshot, why: str, headline: str, by: str) -> dict[str, Any]:
    """The job's state on all nodes, for the coordinator's node."""
    from rallypoint.observe.bundle import safe_name
    from rallypoint.observe.status import status_fields

    folders = {node.name: f"{safe_name(node.host)}-{node.pid}" for node in seen.nodes}
    now = time.time()
    status = status_fields(seen, now)
    return {
        "job": seen.job,
        "round": seen.round,
        "at": now,
        "why": why,
        "headline": mask_text(headline),
        "written_on": by,
        "folders": folders,
        "status": {**status, **{name: mask_strings(status[name]) for name in ("detail", "failures", "events")}},
    }


# Reading


def _read(path: str, most: int) -> bytes:
    """Read one of the kernel's files."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(most)
    return b""


def _read_end(path: str) -> bytes:
    if not path:
        return b""
    with suppress(OSError), open(open_regular(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_READ))
        return file.read(_MOST_READ)
    return b""


def _quietly(call: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return call()
    except (OSError, ValueError, RuntimeError):
        return otherwise
