"""All workers of one start as one unit."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from string import Template

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import UserError
from rallypoint.base.pidfds import HAS_PIDFDS
from rallypoint.workers.context import PContext, SubprocessContext, macros
from rallypoint.workers.logs.specs import DefaultLogsSpecs, Std
from tests.unit.workers.starting import descriptors, interrupted_after, running, start_processes, waited
from tests.unit.workers.test_process import TIMEOUT, guarded, parent_of
from tests.unit.workers.tracing import TRACEABLE, traced
from tests.waiting import until

pytestmark = pytest.mark.process


@contextmanager
def all_closed() -> Iterator[None]:
    """Without pidfds, a thread that watches a process closes its descriptors a moment after the end."""
    before = descriptors()
    yield
    until(lambda: descriptors() == before, "all descriptors are closed")


def started(folder: Path, *texts: str) -> AbstractContextManager[PContext]:
    """One Python process for each program text."""
    return running(folder, sys.executable, {rank: ("-u", "-c", text) for rank, text in enumerate(texts)})


class EndsDuringALook(SubprocessContext):
    """Rank 1 has ended with 0. During the look at it, rank 0 ends with 1."""

    gate: Path

    def _failure_reason(self, rank: int, exitcode: int) -> str:
        if rank == 1 and self._processes[0].exitcode is None:
            self.gate.write_text("go")
            assert select.select([self._processes[0].fileno()], [], [], TIMEOUT)[0]
        return super()._failure_reason(rank, exitcode)


def test_a_failure_during_a_look_is_found(tmp_path: Path) -> None:
    """Two looks at the exits, each of which saw half, found two ends and no failure."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    texts = ("import sys; open(sys.argv[1]).read(); sys.exit(1)", "pass")
    args = {rank: ("-c", text, str(gate)) for rank, text in enumerate(texts)}
    context = EndsDuringALook("group", sys.executable, args, {0: {}, 1: {}}, DefaultLogsSpecs(str(tmp_path)))
    context.gate = gate
    try:
        context.start()
        assert select.select([context._processes[1].fileno()], [], [], TIMEOUT)[0]
        result = waited(context)
        assert list(result.failures) == [0]
        assert result.failures[0].exitcode == 1
    finally:
        context.close(signal.SIGKILL)


def test_exit_descriptors_stay_readable_until_a_poll(tmp_path: Path) -> None:
    with started(tmp_path, "") as context:
        watched = context.exit_fds() or []
        assert select.select(watched[:1], [], [], TIMEOUT)[0]
        assert context.running == ()
        assert context.exit_codes == {0: 0}
        assert context.exit_fds() == watched, "or its end would be found by chance"
        assert context.poll() is not None
        assert context.exit_fds() == []


def test_a_context_from_start_to_close(tmp_path: Path) -> None:
    sleeps = SubprocessContext("group", "sleep", {0: ("600",)}, {0: {}}, DefaultLogsSpecs(str(tmp_path)))
    with all_closed():
        sleeps.start()
        (pid,) = sleeps.pids().values()
        with pytest.raises(ValueError, match=r"'group' have already been started"):
            sleeps.start()
        assert (sleeps.poll(), sleeps.wait(0), sleeps.wait(0.01)) == (None, None, None)
        assert len(sleeps.exit_fds() or ()) == 2, "the worker's and its reaper's"
        sleeps.close()
        sleeps.close()
        assert not Path(f"/proc/{pid}").exists()
        assert sleeps.exit_fds() == []
    SubprocessContext("group", "true", {0: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path))).close()  # never started


@pytest.mark.parametrize(
    ("args", "envs", "words"),
    [
        ({0: (), 2: ()}, {0: {}, 1: {}}, r"args are for the local ranks \[0, 2\]; they must be for 0 to 1"),
        ({0: (), 1: ()}, {0: {}}, r"envs are for the local ranks \[0\]; they must be for 0 to 1"),
    ],
)
def test_local_ranks_must_have_no_gaps(
    tmp_path: Path, args: dict[int, tuple[()]], envs: dict[int, dict[str, str]], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        start_processes("true", args, envs, DefaultLogsSpecs(str(tmp_path)))


def test_a_program_that_cannot_be_started_leaves_nothing_open(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path), Std.ALL, Std.ALL)
    context = SubprocessContext("group", "no-such-program", {0: ()}, {0: {}}, specs)
    assert len(os.listdir(tmp_path)) == 1, "the folder exists before the start"
    with all_closed(), pytest.raises(UserError, match="'no-such-program' was not found"):
        context.start()


def test_an_interrupted_close_can_be_repeated(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf'); signal.pause()"
    with all_closed(), started(tmp_path, deaf, "import time; time.sleep(600)") as context:
        until(lambda: "deaf" in Path(context.stdouts[0]).read_text())
        pids = context.pids()
        with interrupted_after(0.2):
            context.close(timeout=600)
        context.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
        result = context.poll()
        assert result is not None
        assert not result.is_failed(), "the workers were asked to end"
        assert result.return_values == {}
        assert context.stopped == (0, 1)


def test_a_lost_reaper_wakes_the_agent(tmp_path: Path) -> None:
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
def test_success_under_a_debugger(tmp_path: Path) -> None:
    now = tmp_path / "now"
    text = TRACEABLE + f"import os, time\nprint('up')\nwhile not os.path.exists({str(now)!r}): time.sleep(0.01)"
    with started(tmp_path / "logs", text) as context:
        out = Path(context.stdouts[0])
        until(lambda: out.read_text() == "up\n")
        with traced(context.pids()[0]) as tracer:
            now.touch()
            tracer.wait_until_held()
            assert context.wait(0.1, 0.01) is None
            assert context.exit_fds() is None, "its own descriptor would not let us sleep"
            tracer.let_go()
            result = context.wait(30, 0.01)
        assert result is not None
        assert result.return_values == {0: None}
        assert context.exit_fds() == []


# Placeholders in arguments

PIECES = st.lists(
    st.sampled_from(["$", "${local_rank}", "$local_rank", "$local_ranks", "${other}", "$$", "{", "}", " x"])
)


@given(PIECES)
def test_substitution(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert macros.substitute([text], "3") == [Template(text).safe_substitute(local_rank="3")]


def test_other_objects_stay_themselves() -> None:
    thing = object()
    assert macros.substitute([thing, 1, macros.local_rank], "2") == [thing, 1, "2"]
