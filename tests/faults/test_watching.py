"""What is shown of a job, everywhere that it is shown, is what really runs: through faults, a drain and a stop.

Truth is what the kernel says: the processes on each host that have a rank in their environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.faults.cluster import Agent, Cluster, gone, settle
from tests.faults.network import Host
from tests.jobs.browser import Browser, browser
from tests.jobs.launching import Job
from tests.jobs.terminals import Terminal, plain
from tests.jobs.test_pages import needs_browser

_HTTP = 8080  # on a host of the test's own
_RALLYCTL = [sys.executable, "-m", "rallypoint.cli.rallyctl"]
_HOME = "\x1b[H"
_ROWS = "[...document.querySelectorAll('#nodes tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
_FETCHED = """(() => {
  const asked = new XMLHttpRequest();
  asked.open("GET", "/status.json?job=job", false);
  asked.send();
  return asked.responseText;
})()"""

Worker = tuple[str, int, int]
"""The address of its host, its global rank, its pid."""


def running(hosts: Sequence[Host]) -> set[Worker]:
    """The workers that run, as the kernel has them."""
    found = set()
    for host in hosts:
        for pid in host.pids():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            ranks = [int(each.removeprefix(b"RANK=")) for each in environ if each.startswith(b"RANK=")]
            if ranks and not gone(pid):
                found.add((host.address, ranks[0], pid))
    return found


def in_json(status: dict[str, Any]) -> set[Worker]:
    """The workers of a status, each with the rank that stands at its pid's place."""
    nodes = [each for each in status["nodes"] if each["workers"] is not None]
    return {
        (each["address"], rank, pid)
        for each in nodes
        for rank, pid in zip(each["global_ranks"], each["workers"]["pids"], strict=True)
    }


class Watchers:
    """All that shows the job: `status --json`, `status --watch` on and off a terminal, the page and its JSON."""

    def __init__(self, cluster: Cluster, page: Browser) -> None:
        self.hosts = list(cluster.net.hosts)
        self._launcher = cluster.launcher
        self._page = page
        self._watch = [*cluster.host("A").entry, *_RALLYCTL, "status", cluster.endpoint, "--rdzv-id=job", "--watch"]
        page.open(f"http://localhost:{_HTTP}/?job=job")
        self.lines = self._launcher.command(self._watch)
        self.screen = Terminal(self._launcher, self._watch, 120)
        self.screen.resize(120, 50)
        self._told = 0

    def status(self) -> dict[str, Any]:
        """What `rallyctl status --json` prints."""
        job = self._launcher.command([*self._watch[:-1], "--json"])
        job.ends()
        found: dict[str, Any] = json.loads("\n".join(job.out))
        return found

    def agree(
        self, round_: int, participants: Sequence[Agent], spares: Sequence[Agent] = (), said: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Wait until everything shows what runs, and nothing else.

        Args:
            round_: the number of the round.
            participants: the nodes that have a worker each.
            spares: those that have none.
            said: what the lines have told since the last time, in order.

        Returns:
            what `rallyctl status --json` printed.
        """
        truth = running(self.hosts)
        assert truth == {(each.host.address, each.ranks(1)[0], each.pid) for each in participants}
        assert sorted(rank for _, rank, _ in truth) == list(range(len(participants)))
        wanted = {(each.host.address, each.job.pid, "participant") for each in participants}
        wanted |= {(each.host.address, each.job.pid, "spare") for each in spares}

        def holds(status: dict[str, Any]) -> bool:
            nodes = {(each["address"], each["pid"], each["state"]) for each in status["nodes"]}
            return (status["phase"], status["round"], nodes, in_json(status)) == ("running", round_, wanted, truth)

        self._until(self.status, holds, (round_, wanted, truth))
        self._until(lambda: json.loads(self._page.value(_FETCHED)), holds, (round_, wanted, truth))
        rows = {(host, state) for host, _, state in wanted}
        self._until(lambda: self._page.value(_ROWS), lambda seen: _in_rows(seen) == (rows, truth), (rows, truth))
        assert self._page.text("#phase") == "running"
        assert self._page.text("#facts").startswith(f"round\n{round_}\n"), self._page.text("#facts")
        for sentence in said:
            self._told = self._line(sentence)
        self._until(lambda: _frame(self.screen), lambda seen: seen == (f"round {round_}", rows, truth), (rows, truth))
        assert running(self.hosts) == truth, "nothing has changed meanwhile"
        return self.status()

    def _line(self, sentence: str) -> int:
        """Wait for a line after the last one that was waited for; returns the place behind it."""
        begin = self._told

        def place(lines: list[str]) -> int:
            return next((at + 1 for at, each in enumerate(lines[begin:], begin) if sentence in each), 0)

        return place(self.lines.until(lambda lines: place(lines) > 0, sentence))

    def _until(self, look: Callable[[], Any], holds: Callable[[Any], bool], wanted: object) -> None:
        last: list[Any] = [None]

        def right() -> bool:
            last[0] = look()
            return holds(last[0])

        try:
            settle(right, "shown", 30)
        except AssertionError:
            raise AssertionError(f"wanted {wanted}\nseen {last[0]}") from None

    def close(self) -> None:
        """End what is not a job of the launcher."""
        self.screen.signal(signal.SIGTERM)

    def keep(self, name: str) -> None:
        """A screenshot of the page, for people who look at it."""
        self._page.screenshot(self._launcher.folder / f"{name}.png")


def _in_rows(rows: list[list[str]]) -> tuple[set[tuple[str, str]], set[Worker]]:
    """Nodes with their states, and workers, in the table of the page."""
    nodes = {(host, state) for _, _, host, state, *_ in rows}
    return nodes, {(each[2], int(each[4]), int(each[7])) for each in rows if each[7] != "–"}


def _frame(screen: Terminal) -> tuple[str, set[tuple[str, str]], set[Worker]]:
    """The round, nodes with their states, and workers, in what was drawn last on the terminal."""
    lines = plain(screen.raw.rpartition(_HOME)[2]).splitlines()
    round_ = next((each.partition(",")[0] for each in lines if each.startswith("round ")), "")
    rows = [each.split() for each in lines if " 10.77." in each]
    nodes = {(host, state) for _, _, state, _, host, *_ in rows}
    return round_, nodes, {(row[4], int(row[3]), int(row[6])) for row in rows if row[6:] not in ([], ["-"])}


def served(cluster: Cluster) -> Job:
    """A control plane with pages, on the host of agent A."""
    command = [*cluster.host("A").entry, *_RALLYCTL, "serve", f"--endpoint={cluster.endpoint}", f"--http={_HTTP}"]
    server = cluster.launcher.command([*command, "--remote-control"])
    server.until_err("control plane listens")
    return server


@needs_browser
def test_what_is_shown_is_what_runs(cluster: Cluster) -> None:
    for name in "ABCD":
        cluster.host(name)
    served(cluster)
    cluster.conf = "is_host=false"
    cluster.lease = 4.0  # a browser starts beside the job, which must not cost it a node

    def steer(*words: str) -> None:
        job = cluster.launcher.command(
            [*cluster.host("A").entry, *_RALLYCTL, *words, cluster.endpoint, "--rdzv-id=job"]
        )
        assert job.ends() == 0, job.err

    def entry(round_: int, spare: Agent) -> str:
        name = f"{socket.gethostname()} pid {spare.job.pid} (rank {spare.ranks(1)[0]})"
        return f"round {round_} started with 3 nodes, new: {name}"

    first = [cluster.start(name, "--max-restarts=3") for name in "ABC"]
    a, b, c = first
    cluster.all_up(first)
    with browser(cluster.host("A").entry) as page, closing(Watchers(cluster, page)) as seen:
        seen.lines.until(bool, "how it stands")
        d = cluster.start("D", "--max-restarts=3")
        seen.agree(0, first, [d], ["job job, round 0: running"])

        victim, rank = b.pid, b.ranks(1)[0]
        os.kill(victim, signal.SIGKILL)
        cluster.all_up(first, starts=2)
        status = seen.agree(1, first, [d], ["round 0 ended", "round 1 started with 3 nodes"])
        (failure,) = status["failures"]
        assert (failure["round"], failure["rank"], failure["pid"], failure["exitcode"]) == (0, rank, victim, -9)
        assert (status["restarts"]["failures"], status["restarts"]["left"]) == (1, 2)
        seen.keep("a worker has died")

        with b.host.unplugged():
            for agent, starts in ((a, 3), (c, 3), (d, 1)):
                agent.comes_up(1, starts=starts, world_size=3)
            # What runs where nobody can look is not known: its worker runs on until its agent hears of the round.
            seen.hosts.remove(b.host)
            status = seen.agree(2, [a, c, d], [], ["round 1 ended", entry(2, d)])
            assert (status["restarts"]["failures"], status["restarts"]["nodes_lost"]) == (1, 1)
            assert [each["rank"] for each in status["failures"]] == [rank, None]
            seen.keep("a spare has taken the place of a lost node")
        settle(lambda: gone(b.pid), "the worker of the host that is back is stopped")
        seen.hosts.append(b.host)
        seen.agree(2, [a, c, d], [b])

        steer("drain", c.host.address)
        assert c.job.ends() == 0, c.job.err
        for agent, starts in ((a, 4), (d, 2), (b, 3)):
            agent.comes_up(1, starts=starts, world_size=3)
        seen.agree(3, [a, d, b], [], ["drains", "round 2 ended", entry(3, b)])
        seen.keep("a node has been drained")

        steer("stop")
        for agent in (a, b, d):
            assert agent.job.ends() == 1, agent.job.err
        assert (seen.lines.ends(), seen.screen.ends()) == (4, 4)
        page.wait_for_text("stopped", "#phase")
        page.wait_for_text("has stopped the job", "#facts")
        seen.keep("stopped")
        assert "has stopped the job" in seen.lines.out[-1]
        assert seen.status()["phase"] == "stopped"
        assert running(cluster.net.hosts) == set()
        assert not page.said
