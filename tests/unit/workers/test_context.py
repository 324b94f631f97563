"""All workers of one start as one unit."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from rallypoint.base.errors import UserError
from rallypoint.base.pidfds import HAS_PIDFDS
from rallypoint.workers.context import PContext, RunProcsResult, SubprocessContext
from rallypoint.workers.logs.specs import DefaultLogsSpecs, Std
from tests.unit.workers.starting import start_processes
from tests.unit.workers.test_process import TIMEOUT, guarded, parent_of
from tests.unit.workers.tracing import TRACEABLE, traced
from tests.waiting import until

pytestmark = pytest.mark.process


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def until_closed(before: set[str]) -> None:
    """Without pidfds, the thread that watches a process closes its own descriptors a moment after the end."""
    until(lambda: descriptors() == before, "all that was opened is closed")


@contextmanager
def started(folder: Path, *texts: str, envs: dict[int, dict[str, str]] | None = None) -> Iterator[PContext]:
    """One Python process for each program text, with both streams in files."""
    args = {rank: ("-u", "-c", text) for rank, text in enumerate(texts)}
    specs = DefaultLogsSpecs(str(folder), redirects=Std.ALL)
    context = start_processes(sys.executable, args, envs or {rank: {} for rank in args}, specs)
    try:
        yield context
    finally:
        context.close(signal.SIGKILL)


def waited(context: PContext) -> RunProcsResult:
    result = context.wait(30)
    assert result is not None
    return result


class EndsWhileWeLook(SubprocessContext):
    """Rank 1 has ended with 0; rank 0 ends with 1 when that has been seen, and before the look is over."""

    gate: Path

    def _failure_reason(self, rank: int, exitcode: int) -> str:
        if rank == 1 and self._processes[0].exitcode is None:
            self.gate.write_text("go")
            assert select.select([self._processes[0].fileno()], [], [], TIMEOUT)[0]
        return super()._failure_reason(rank, exitcode)


def test_a_failure_that_comes_while_we_look_is_one(tmp_path: Path) -> None:
    """Two looks in one, of which each saw half, found two ends and no failure."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    texts = ("import sys; open(sys.argv[1]).read(); sys.exit(1)", "pass")
    args = {rank: ("-c", text, str(gate)) for rank, text in enumerate(texts)}
    context = EndsWhileWeLook("group", sys.executable, args, {0: {}, 1: {}}, DefaultLogsSpecs(str(tmp_path)))
    context.gate = gate
    try:
        context.start()
        assert select.select([context._processes[1].fileno()], [], [], TIMEOUT)[0]
        result = waited(context)
        assert list(result.failures) == [0]
        assert result.failures[0].exitcode == 1
    finally:
        context.close(signal.SIGKILL)


def test_looking_without_waiting(tmp_path: Path) -> None:
    with started(tmp_path, "import time; time.sleep(600)") as context:
        assert context.poll() is None
        assert context.wait(0) is None
        assert context.wait(0.01) is None
        assert len(context.exit_fds() or ()) == 2, "the worker's and its reaper's"


def test_an_end_that_others_have_seen_still_wakes_who_polls(tmp_path: Path) -> None:
    with started(tmp_path, "") as context:
        watched = context.exit_fds() or []
        assert select.select(watched[:1], [], [], TIMEOUT)[0]
        assert context.running == ()
        assert context.exit_codes == {0: 0}
        assert context.exit_fds() == watched, "or its end would be found by chance"
        assert context.poll() is not None
        assert context.exit_fds() == []


def test_closing_stops_and_may_be_repeated(tmp_path: Path) -> None:
    before = descriptors()
    with started(tmp_path, "import time; time.sleep(600)") as context:
        (pid,) = context.pids().values()
        context.close()
        context.close()
        assert not Path(f"/proc/{pid}").exists()
        assert context.exit_fds() == []
    until_closed(before)


def test_used_once(tmp_path: Path) -> None:
    context = SubprocessContext("group", "true", {0: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path)))
    context.start()
    with pytest.raises(ValueError, match=r"'group' have already been started"):
        context.start()
    assert context.wait(30) is not None


def test_closing_what_was_never_started(tmp_path: Path) -> None:
    SubprocessContext("group", "true", {0: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path))).close()


@pytest.mark.parametrize(
    ("args", "envs", "words"),
    [
        ({0: (), 2: ()}, {0: {}, 1: {}}, r"args are for the local ranks \[0, 2\]; they must be for 0 to 1"),
        ({0: (), 1: ()}, {0: {}}, r"envs are for the local ranks \[0\]; they must be for 0 to 1"),
    ],
)
def test_ranks_without_gaps(
    tmp_path: Path, args: dict[int, tuple[()]], envs: dict[int, dict[str, str]], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        start_processes("true", args, envs, DefaultLogsSpecs(str(tmp_path)))


def test_a_program_that_cannot_be_started_leaves_nothing(tmp_path: Path) -> None:
    before = descriptors()
    with pytest.raises(UserError, match="'no-such-program' was not found"):
        start_processes("no-such-program", {0: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path), Std.ALL, Std.ALL))
    until_closed(before)


class Interrupted(BaseException):
    """What a signal handler raises in the midst of closing."""


def test_a_close_that_is_cut_short_can_be_finished(tmp_path: Path) -> None:
    before = descriptors()
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf'); signal.pause()"

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        with started(tmp_path, deaf, "import time; time.sleep(600)") as context:
            until_said(Path(context.stdouts[0]), "deaf")
            pids = context.pids()
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Interrupted):
                context.close(timeout=600)
            context.close()
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
            result = context.poll()
            assert result is not None
            assert not result.is_failed(), "they were asked to end"
            assert result.return_values == {}
            assert context.stopped == (0, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    until_closed(before)


def until_said(path: Path, word: str) -> None:
    """Wait until a worker has written a word into its file."""
    until(lambda: word in path.read_text(), f"{path} has {word!r}")


def test_a_reaper_that_is_known_to_be_lost_wakes_whoever_waits(tmp_path: Path) -> None:
    with guarded() as reaper:
        specs = DefaultLogsSpecs(str(tmp_path))
        context = SubprocessContext("group", "sleep", {0: ("600",)}, {0: {}}, specs, reaper=reaper)
        context.start()
        try:
            os.kill(parent_of(context.pids()[0]), signal.SIGKILL)
            until(lambda: reaper.lost)
            assert select.select(context.exit_fds() or (), [], [], TIMEOUT)[0]
            result = context.poll()
            assert result is not None
            assert result.failures[0].exitcode == -signal.SIGKILL
            assert "the reaper" in result.failures[0].message
        finally:
            context.close(signal.SIGKILL)


@pytest.mark.skipif(not HAS_PIDFDS, reason="without pidfds, the end shows when the debugger has let go")
def test_success_in_the_hands_of_a_debugger_is_success(tmp_path: Path) -> None:
    now = tmp_path / "now"
    text = TRACEABLE + f"import os, time\nprint('up')\nwhile not os.path.exists({str(now)!r}): time.sleep(0.01)"
    with started(tmp_path / "logs", text) as context:
        out = Path(context.stdouts[0])
        until(lambda: out.read_text() == "up\n")
        with traced(context.pids()[0]) as tracer:
            now.touch()
            tracer.holds()
            assert context.wait(0.1, 0.01) is None
            assert context.exit_fds() is None, "its own descriptor would not let us sleep"
            tracer.lets_go()
            result = context.wait(30, 0.01)
        assert result is not None
        assert result.return_values == {0: None}
        assert context.exit_fds() == []


def test_the_folders_are_there_before_anything_is_started(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path))
    context = SubprocessContext("group", "no-such-program", {0: ()}, {0: {}}, specs)
    assert len(os.listdir(tmp_path)) == 1
    with pytest.raises(UserError, match="no-such-program"):
        context.start()
