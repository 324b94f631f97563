"""Restarts wait for GPU memory: the rules, and that the wait does no harm."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.gpu_holders import MUCH, Holder, Share
from rallypoint.base.kernel import until_readable
from rallypoint.base.nvml import GpuMemory, GpuProcess
from rallypoint.features import gpu_memory, table
from rallypoint.features.gpu_memory import GpuMemoryWait, Look, MemoryVerdict, judge
from tests.unit.agent.features import finish
from tests.unit.agent.test_stopping import TIMEOUT
from tests.unit.agent.thread_workers import ThreadWorkers

GIB = 1 << 30
ENDED, OURS, OTHER = Holder.ENDED, Holder.OURS, Holder.OTHER


def look(*gpus: GpuMemory, **holders: Holder) -> Look:
    """A look at these GPUs; `p7=ENDED` classifies process 7."""
    return Look(dict(enumerate(gpus)), {int(name[1:]): holder for name, holder in holders.items()})


def blind(*used: int | None) -> Look:
    """A look from another pid namespace."""
    return Look({index: GpuMemory(used=bytes_) for index, bytes_ in enumerate(used)}, None)


def gpu(*processes: tuple[int, int | None]) -> GpuMemory:
    return GpuMemory(total=80 * GIB, used=62 * GIB, processes=tuple(GpuProcess(*process) for process in processes))


# The rules


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (look(), MemoryVerdict()),
        (look(gpu(), gpu()), MemoryVerdict()),
        (look(gpu((7, 61 * GIB)), p7=ENDED), MemoryVerdict(waits_for=(Share(0, 7, 61 * GIB),))),
        (look(gpu(), gpu((7, None)), p7=ENDED), MemoryVerdict(waits_for=(Share(1, 7, None),))),
        (look(gpu((7, 61 * GIB)), p7=OURS), MemoryVerdict()),
        (look(gpu((7, MUCH)), p7=OTHER), MemoryVerdict(strangers=(Share(0, 7, MUCH),))),
        (look(gpu((7, MUCH - 1), (8, None)), p7=OTHER, p8=OTHER), MemoryVerdict()),
        (look(gpu((7, GIB), (8, GIB)), p7=OTHER, p8=ENDED), MemoryVerdict((Share(0, 8, GIB),), (Share(0, 7, GIB),))),
        (look(GpuMemory()), MemoryVerdict()),
        (look(GpuMemory(used=GIB)), MemoryVerdict(waits_for=(Share(0, 0, GIB),))),
    ],
)
def test_verdict_by_processes(seen: Look, verdict: MemoryVerdict) -> None:
    assert judge(seen, None) == verdict


@pytest.mark.parametrize(
    ("before", "now", "waits"),
    [
        (None, blind(5), True),
        (None, blind(None), False),
        (blind(5), blind(4), True),
        (blind(5), blind(5), False),
        (blind(4), blind(5), False),
        (blind(5, 5), blind(5, 4), True),
        (blind(None), blind(5), False),
        (blind(5), blind(5, 5), False),
    ],
)
def test_verdict_by_memory_without_pids(before: Look | None, now: Look, waits: bool) -> None:
    assert bool(judge(now, before).waits_for) is waits
    assert judge(now, before).strangers == ()


_AMOUNTS = st.none() | st.integers(0, 80 * GIB)
_PROCESSES = st.none() | st.lists(st.builds(GpuProcess, st.integers(1, 5), _AMOUNTS), max_size=4).map(tuple)
_GPUS = st.lists(st.builds(GpuMemory, used=_AMOUNTS, processes=_PROCESSES), max_size=3)
_HOLDERS = st.none() | st.dictionaries(st.integers(1, 5), st.sampled_from(Holder))
_LOOKS = st.builds(lambda gpus, holders: Look(dict(enumerate(gpus)), holders), _GPUS, _HOLDERS)


@given(_LOOKS, st.none() | _LOOKS)
def test_laws_of_the_verdict(now: Look, before: Look | None) -> None:
    verdict = judge(now, before)
    holders = now.holders or {}
    assert all(holders[share.pid] is ENDED for share in verdict.waits_for if share.pid)
    assert all(holders.get(share.pid, OTHER) is OTHER for share in verdict.strangers)
    if now.holders is None:
        assert verdict.strangers == ()
    again = judge(now, now, [share.pid for share in verdict.waits_for])
    assert again.waits_for == (), "nothing is waited for twice in vain"


# The wait


class Restart:
    """Restarts of an agent whose worker has died; the test plays the agent's loop."""

    def __init__(self, looks: Callable[[], Generator[Look]], timeout: float) -> None:
        self.workers = ThreadWorkers(lambda rank, start, stopping: rank)
        self.workers.started_at = 1.0
        self.wait = GpuMemoryWait(self.workers, timeout, lambda _job: looks())
        self.workers.add_preparation(self.wait)

    def begin(self) -> None:
        self.wait.begin(self.workers.group)

    def waits(self) -> bool:
        return self.workers.preparations.preparing()

    def turn(self) -> None:
        """One turn of the loop."""
        until_readable(self.wait.fds(), max(0.0, min(self.wait.wake_at() - time.monotonic(), TIMEOUT)))
        self.wait.step()

    def finish(self) -> float:
        """Wait until the workers may start; returns the seconds."""
        seconds = finish(self.wait)
        assert self.workers.preparations.failed() is None
        return seconds

    def run(self) -> float:
        """A whole restart; returns the seconds that its workers had to wait."""
        self.begin()
        return self.finish()


class Driver:
    """Answers looks one after the other, and repeats the last one; `gate` blocks each answer."""

    def __init__(self, *looks: Look | Exception, gate: threading.Event | None = None) -> None:
        self.looks = looks
        self.gate = gate
        self.asked = 0
        self.closed = 0

    def __call__(self) -> Generator[Look]:
        try:
            for number in itertools.count() if self.looks else ():
                answer = self.looks[min(number, len(self.looks) - 1)]
                self.asked += 1
                if self.gate:
                    self.gate.wait(TIMEOUT)
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            self.closed += 1


HELD = look(gpu((7, 61 * GIB)), p7=ENDED)
FREE = look(gpu())
Make = Callable[..., Restart]


@pytest.fixture
def make() -> Iterator[Make]:
    restarts: list[Restart] = []

    def restart(looks: Callable[[], Generator[Look]], timeout: float = TIMEOUT) -> Restart:
        restarts.append(Restart(looks, timeout))
        return restarts[-1]

    yield restart
    for made in restarts:
        made.workers.close()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=gpu_memory.__name__)
    return caplog


def test_the_first_workers_do_not_wait(make: Make, log: pytest.LogCaptureFixture) -> None:
    driver = Driver(HELD)
    first = make(driver)
    first.workers.started_at = 0.0
    first.run()
    assert (driver.asked, log.text) == (0, "")


def test_free_memory_costs_one_look(make: Make, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "_WORTH_A_LINE", TIMEOUT)  # a busy machine may take that long
    for driver in (Driver(FREE), Driver(look(gpu((7, 61 * GIB)), p7=OURS)), Driver()):
        make(driver).run()
        assert driver.asked == min(1, len(driver.looks))
        assert driver.closed == 1, "the driver's library is released"
    assert log.text == ""


def test_workers_start_when_memory_is_free(make: Make, log: pytest.LogCaptureFixture) -> None:
    driver = Driver(*[HELD] * 5, FREE)
    assert make(driver).run() >= 0.01 + 0.02 + 0.04 + 0.08 + 0.16
    assert driver.asked == 6
    assert "the restart waited 0." in log.text
    assert log.text.rstrip().endswith(" s for the memory of GPU 0")


def test_workers_start_at_the_limit(make: Make, log: pytest.LogCaptureFixture) -> None:
    restart = make(Driver(HELD), 0.3)
    assert restart.run() >= 0.3
    assert log.messages == [
        "starting the workers even though GPU memory was still in use after 0.3 s (--gpu-memory-timeout): "
        "GPU 0: 61 GiB held by pid 7, which has ended"
    ]
    log.clear()
    assert restart.run() < TIMEOUT
    assert log.messages == [], "a process is not waited for again in vain"


def test_without_pids_the_wait_lasts_while_memory_falls(make: Make, log: pytest.LogCaptureFixture) -> None:
    driver = Driver(blind(9), blind(8), blind(7), blind(7))
    make(driver).run()
    assert driver.asked == 4
    log.clear()
    make(lambda: (blind(1000 * GIB - count) for count in itertools.count()), 0.3).run()
    assert "(--gpu-memory-timeout): GPU 0: 1000 GiB in use" in log.text


def test_a_stranger_is_named_once_and_not_waited_for(
    make: Make, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "describe_process", lambda pid: f"pid {pid} (python, user bob)")
    stranger = gpu((4711, 61 * GIB), (8, 1))
    driver = Driver(look(stranger, stranger, p4711=OTHER, p8=OTHER))
    restart = make(driver)
    restart.run()
    restart.run()
    assert driver.asked == 2
    held = "GPU 0: 61 GiB, GPU 1: 61 GiB held by pid 4711 (python, user bob), which is not part of this job"
    assert [line for line in log.messages if "held" in line] == [held]


def test_a_driver_that_hangs_delays_one_restart(make: Make, log: pytest.LogCaptureFixture) -> None:
    driver = Driver(FREE, gate=threading.Event())
    restart = make(driver, 0.2)
    assert restart.run() >= 0.2
    restart.run()
    assert driver.asked == 1, "while it hangs, no restart waits again"
    assert log.messages == [
        "starting the workers without checking GPU memory: NVIDIA's driver did not answer within 0.2 s"
    ]
    assert driver.gate is not None
    driver.gate.set()
    while restart.wait._in_driver():
        threading.Event().wait(0.01)
    restart.run()
    assert driver.asked == 2


def test_the_end_of_the_round_ends_the_wait(make: Make) -> None:
    driver = Driver(HELD)
    restart = make(driver)
    for _ in range(2):
        restart.begin()
        while not driver.asked:
            restart.turn()
        restart.wait.cancel()
        assert not restart.waits()
    driver.looks = (FREE,)
    restart.run()


def test_rounds_ask_the_driver_one_after_the_other(make: Make) -> None:
    driver = Driver(FREE, gate=threading.Event())
    restart = make(driver)
    restart.begin()
    while not driver.asked:
        restart.wait.step()
    restart.begin()
    for _ in range(3):
        restart.wait.step()
    assert restart.waits()
    assert driver.asked == 1
    assert driver.gate is not None
    driver.gate.set()
    restart.finish()
    assert driver.asked == 2


def test_after_an_exception_of_the_driver_it_is_not_asked_again(make: Make, log: pytest.LogCaptureFixture) -> None:
    driver = Driver(OSError("the driver is upset"))
    restart = make(driver)
    restart.run()
    (record,) = [record for record in log.records if record.levelno >= logging.WARNING]
    assert "checking GPU memory failed; restarts will no longer wait for it" in record.getMessage()
    assert "the driver is upset" in log.text
    restart.run()
    assert driver.asked == 1


def test_workers_start_without_the_check_if_it_cannot_run(
    make: Make, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "held_by", lambda *_: 1 / 0)
    make(Driver(HELD), 0.1).run()
    assert "the wait for GPU memory failed; the job continues without it" in log.text
    log.clear()
    monkeypatch.setattr("rallypoint.base.mailbox.start_thread", lambda *_: None)
    make(Driver(HELD)).run()
    assert log.messages == [
        "starting the workers without checking GPU memory: this machine does not allow any more threads"
    ]


def test_the_wait_begins_when_the_survivors_have_ended(make: Make) -> None:
    driver = Driver(FREE)
    restart = make(driver)
    stop = SimpleNamespace(done=False)
    context: Any = SimpleNamespace(stopping=stop)
    restart.workers.pcontext = context
    restart.begin()
    restart.wait.step()
    assert restart.waits()
    assert driver.asked == 0
    stop.done = True
    restart.finish()
    assert driver.asked == 1
    restart.workers.pcontext = None


@pytest.mark.parametrize(
    ("devices", "visible", "sees"),
    [
        (["/none", os.devnull], None, True),
        ([os.devnull, "/none"], "0,1", True),
        ([os.devnull], "", False),
        (["/none"], None, False),
    ],
)
def test_sees_gpus(monkeypatch: pytest.MonkeyPatch, devices: list[str], visible: str | None, sees: bool) -> None:
    monkeypatch.setattr(table, "NVIDIA_DEVICES", devices)
    assert table.sees_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) is sees
