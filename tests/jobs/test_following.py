"""`rallyctl status --watch` on terminals and elsewhere, until the job ends."""

from __future__ import annotations

import json
import signal

from tests.jobs.launching import RALLYCTL, RALLYRUN, AtOnce, Launcher
from tests.jobs.nodes import all_end
from tests.jobs.terminals import Terminal
from tests.jobs.test_control_plane import outside, serve
from tests.ports import free_port

_ALTERNATE, _NORMAL = "\x1b[?1049h", "\x1b[?1049l"


def a_job_is_followed_through_a_restart_of_its_control_plane(rallyrun: Launcher) -> None:
    port = free_port()
    server = serve(rallyrun, port)
    job = outside(rallyrun, port, "2")
    watch = [*RALLYCTL, "status", f"127.0.0.1:{port}", "--rdzv-id=job", "--watch"]
    nodes = job.up()
    screen = Terminal(rallyrun, watch, 40, {"NO_COLOR": "1"})
    place = screen.until("running since")
    screen.until("participant", 0)
    lines = rallyrun.command(watch)
    lines.until(lambda out: any("job job, round 0: running" in each for each in out), "how it stands")
    documents = rallyrun.command([*watch, "--json"])
    documents.until(bool, "a document")
    server.signal(signal.SIGKILL)
    place = screen.until("unreachable", place)
    lines.until(lambda out: any("unreachable; reconnecting" in each for each in out), "that it is lost")
    server = serve(rallyrun, port)
    lines.until(lambda out: any("reachable again after a restart" in each for each in out), "that it is back")
    screen.until("running since", place)
    job.say("finish")
    all_end(nodes, 0)
    assert (screen.ends(), lines.ends(), documents.ends()) == (5, 5, 5)
    assert "the job has succeeded" in lines.out[-1]
    assert lines.err == ""
    assert json.loads(documents.out[-1])["phase"] == "succeeded"
    assert "unreachable" in documents.err
    assert screen.raw.count(_ALTERNATE) == screen.raw.count(_NORMAL) == 1
    after = screen.raw[screen.raw.index(_NORMAL) :]
    assert "succeeded" in after, "how it has ended stays on the terminal"
    assert "\x1b[32m" not in screen.raw, "NO_COLOR"
    server.signal(signal.SIGTERM)
    assert server.ends() == 0


def who_follows_is_not_held_up_by_a_terminal_that_knows_no_screen(rallyrun: Launcher) -> None:
    port = free_port()
    server = serve(rallyrun, port)
    job = outside(rallyrun, port, "1")
    node = job.start("A")
    node.comes_up(1)
    watch = [*RALLYCTL, "status", f"127.0.0.1:{port}", "--watch"]
    plain = Terminal(rallyrun, watch, env={"TERM": "dumb"})
    plain.until("job job, round 0: running")
    interrupted = Terminal(rallyrun, watch)
    interrupted.until("running since")
    interrupted.signal(signal.SIGINT)
    assert interrupted.ends() == -signal.SIGINT
    assert interrupted.raw.rindex(_NORMAL) > interrupted.raw.rindex(_ALTERNATE)
    assert "Traceback" not in interrupted.text
    job.say("finish")
    assert node.job.ends() == 0
    assert plain.ends() == 5
    assert "\x1b" not in plain.raw
    server.signal(signal.SIGTERM)
    assert server.ends() == 0


def an_agent_on_a_terminal_shows_what_it_waits_for_in_one_line(rallyrun: Launcher) -> None:
    port = free_port()
    script = rallyrun.script("import time; print('worker', flush=True)", "printing.py")
    flags = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=live", script]
    terminal = Terminal(rallyrun, [*RALLYRUN, *flags], 60)
    place = terminal.until("waiting for nodes: 1 of 2 joined, ")
    terminal.until("missing 1", place)
    place = terminal.until("waiting for nodes: 1 of 2 joined, ", place)
    other = rallyrun(*flags)
    terminal.until("worker\n", place)
    assert (terminal.ends(), other.ends()) == (0, 0)
    lines = shown(terminal.raw)
    assert not any("waiting for" in each for each in lines), "it is taken away, and no line of the log says it again"
    assert "worker" in lines
    assert "waiting for" not in other.err


def shown(raw: str) -> list[str]:
    """The lines that a terminal holds to which this was written."""
    return [line.rpartition("\r\x1b[K")[2] for line in raw.replace("\r\n", "\n").split("\n")]


def test_jobs_are_followed(at_once: AtOnce) -> None:
    at_once(
        a_job_is_followed_through_a_restart_of_its_control_plane,
        who_follows_is_not_held_up_by_a_terminal_that_knows_no_screen,
        an_agent_on_a_terminal_shows_what_it_waits_for_in_one_line,
    )
