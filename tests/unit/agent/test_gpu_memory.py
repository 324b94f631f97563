"""How long a restart waits for GPU memory: the rules, and that the wait cannot harm."""

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
from tests.unit.agent.test_stopping import TIMEOUT
from tests.unit.agent.thread_workers import ThreadWorkers

GIB = 1 << 30
ENDED, OURS, OTHER = Holder.ENDED, Holder.OURS, Holder.OTHER


def look(*gpus: GpuMemory, **holders: Holder) -> Look:
    """A look at these GPUs; `p7=ENDED` says what process 7 is."""
    return Look(dict(enumerate(gpus)), {int(name[1:]): what for name, what in holders.items()})


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
        # Neither memory nor processes are known: there is nothing to wait for.
        (look(GpuMemory()), MemoryVerdict()),
        (look(GpuMemory(used=GIB)), MemoryVerdict(waits_for=(Share(0, 0, GIB),))),
    ],
)
def test_processes_decide(seen: Look, verdict: MemoryVerdict) -> None:
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
def test_where_pids_mean_nothing_memory_decides(before: Look | None, now: Look, waits: bool) -> None:
    assert bool(judge(now, before).waits_for) is waits
    assert judge(now, before).strangers == ()


def test_a_process_that_never_gave_its_memory_back_is_not_waited_for_again() -> None:
    seen = look(gpu((7, GIB), (8, GIB)), p7=ENDED, p8=ENDED)
    assert judge(seen, None, {7}).waits_for == (Share(0, 8, GIB),)


_AMOUNTS = st.none() | st.integers(0, 80 * GIB)
_PROCESSES = st.none() | st.lists(st.builds(GpuProcess, st.integers(1, 5), _AMOUNTS), max_size=4).map(tuple)
_GPUS = st.lists(st.builds(GpuMemory, used=_AMOUNTS, processes=_PROCESSES), max_size=3)
_HOLDERS = st.none() | st.dictionaries(st.integers(1, 5), st.sampled_from(Holder))
_LOOKS = st.builds(lambda gpus, holders: Look(dict(enumerate(gpus)), holders), _GPUS, _HOLDERS)


@given(_LOOKS, st.none() | _LOOKS)
def test_live_processes_are_never_waited_for_and_ours_never_named(now: Look, before: Look | None) -> None:
    verdict = judge(now, before)
    holders = now.holders or {}
    assert all(holders[share.pid] is ENDED for share in verdict.waits_for if share.pid)
    assert all(holders.get(share.pid, OTHER) is OTHER for share in verdict.strangers)
    if now.holders is None:
        assert verdict.strangers == ()
    again = judge(now, now, [share.pid for share in verdict.waits_for])
    assert again.waits_for == (), "what does not change is waited for no longer than its limit"


# The wait


class Waits:
    """The wait of an agent whose worker has died; the agent's loop is played."""

    def __init__(self, looks: Callable[[], Generator[Look]], timeout: float = TIMEOUT) -> None:
        self.workers = ThreadWorkers(lambda rank, start, stopping: rank)
        self.workers.started_at = 1.0
        self.wait = GpuMemoryWait(self.workers, timeout, lambda _job: looks())
        self.workers.add_preparation(self.wait)

    def begin(self) -> None:
        self.wait.begin(self.workers.group)

    def turn(self) -> None:
        """One turn of the loop."""
        until_readable(self.wait.fds(), max(0.0, min(self.wait.wake_at() - time.monotonic(), TIMEOUT)))
        self.wait.step()

    def ends(self) -> float:
        """Begin a restart, and return the seconds for which its workers had to wait."""
        began = time.monotonic()
        self.begin()
        while self.workers.preparations.preparing():
            assert time.monotonic() - began < TIMEOUT
            self.turn()
        assert self.workers.preparations.failed() is None
        return time.monotonic() - began


class Driver:
    """Answers looks, the last one for ever; counts them."""

    def __init__(self, *looks: Look | Exception) -> None:
        self.looks = looks
        self.asked = 0
        self.closed = 0

    def __call__(self) -> Generator[Look]:
        try:
            for number in itertools.count() if self.looks else ():
                answer = self.looks[min(number, len(self.looks) - 1)]
                self.asked += 1
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            self.closed += 1


HELD = look(gpu((7, 61 * GIB)), p7=ENDED)
FREE = look(gpu())


@pytest.fixture
def restarts() -> Iterator[Callable[..., Waits]]:
    made: list[Waits] = []

    def make(looks: Callable[[], Generator[Look]], timeout: float = TIMEOUT) -> Waits:
        made.append(Waits(looks, timeout))
        return made[-1]

    yield make
    for waits in made:
        waits.workers.close()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=gpu_memory.__name__)
    return caplog


def test_the_first_workers_do_not_wait(restarts: Callable[..., Waits], log: pytest.LogCaptureFixture) -> None:
    driver = Driver(HELD)
    first = restarts(driver)
    first.workers.started_at = 0.0
    first.ends()
    assert (driver.asked, log.text) == (0, "")


def test_free_memory_costs_one_look_and_no_word(
    restarts: Callable[..., Waits], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "_WORTH_A_LINE", TIMEOUT)  # a busy machine may take that long
    for driver in (Driver(FREE), Driver(look(gpu((7, 61 * GIB)), p7=OURS)), Driver()):
        restarts(driver).ends()
        assert driver.asked == min(1, len(driver.looks))
        assert driver.closed == 1, "the driver's library is released"
    assert log.text == ""


def test_workers_start_once_the_memory_is_free(restarts: Callable[..., Waits], log: pytest.LogCaptureFixture) -> None:
    driver = Driver(*[HELD] * 5, FREE)
    seconds = restarts(driver).ends()
    assert driver.asked == 6
    assert seconds >= 0.01 + 0.02 + 0.04 + 0.08 + 0.16
    assert "the restart waited 0." in log.text
    assert log.text.rstrip().endswith(" s for the memory of GPU 0")


def test_workers_start_at_the_limit(restarts: Callable[..., Waits], log: pytest.LogCaptureFixture) -> None:
    driver = Driver(HELD)
    waits = restarts(driver, 0.3)
    assert waits.ends() >= 0.3
    (line,) = log.messages
    assert line == (
        "starting the workers even though GPU memory was still in use after 0.3 s (--gpu-memory-timeout): "
        "GPU 0: 61 GiB held by pid 7, which has ended"
    )
    log.clear()
    assert waits.ends() < TIMEOUT
    assert log.messages == [], "what was waited for in vain is not waited for again"


def test_memory_alone_is_looked_at_until_it_falls_no_more(
    restarts: Callable[..., Waits], log: pytest.LogCaptureFixture
) -> None:
    driver = Driver(blind(9), blind(8), blind(7), blind(7))
    restarts(driver).ends()
    assert driver.asked == 4
    falling = (blind(1000 * GIB - count) for count in range(10**6))

    def falls() -> Generator[Look]:
        yield from falling

    log.clear()
    restarts(falls, 0.3).ends()
    assert "(--gpu-memory-timeout): GPU 0: 1000 GiB in use" in log.text


def test_a_stranger_is_named_once_and_not_waited_for(
    restarts: Callable[..., Waits], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "describe_process", lambda pid: f"pid {pid} (python, user bob)")
    stranger = gpu((4711, 61 * GIB), (8, 1))
    driver = Driver(look(stranger, stranger, p4711=OTHER, p8=OTHER))
    waits = restarts(driver)
    for _ in range(2):
        waits.ends()
    assert driver.asked == 2
    held = "GPU 0: 61 GiB, GPU 1: 61 GiB held by pid 4711 (python, user bob), which is not part of this job"
    assert [line for line in log.messages if "held" in line] == [held]


def test_a_driver_that_does_not_answer_delays_one_restart(
    restarts: Callable[..., Waits], log: pytest.LogCaptureFixture
) -> None:
    answers, asked = threading.Event(), []

    def hangs() -> Generator[Look]:
        asked.append(threading.get_ident())
        answers.wait(TIMEOUT)
        yield FREE

    waits = restarts(hangs, 0.2)
    assert waits.ends() >= 0.2
    assert log.messages == [
        "starting the workers without checking GPU memory: NVIDIA's driver did not answer within 0.2 s"
    ]
    waits.ends()
    assert len(asked) == len(log.messages) == 1, "while it hangs, no restart waits again"
    answers.set()
    while waits.wait._in_driver():
        threading.Event().wait(0.01)
    waits.ends()
    assert len(asked) == 2


def test_a_round_that_ends_meanwhile_ends_the_wait(restarts: Callable[..., Waits]) -> None:
    driver = Driver(HELD)
    waits = restarts(driver)
    for _ in range(2):
        waits.begin()
        while not driver.asked:
            waits.turn()
        waits.wait.cancel()
        assert not waits.workers.preparations.preparing()
    driver.looks = (FREE,)
    waits.ends()
    assert waits.workers.preparations.failed() is None


def test_a_thread_of_an_earlier_round_is_out_of_the_driver_before_the_next_one_looks(
    restarts: Callable[..., Waits],
) -> None:
    answers, asked = threading.Event(), []

    def hangs() -> Generator[Look]:
        asked.append(threading.get_ident())
        answers.wait(TIMEOUT)
        yield FREE

    waits = restarts(hangs)
    waits.begin()
    while not asked:
        waits.wait.step()
    waits.begin()
    for _ in range(3):
        waits.wait.step()
    assert waits.workers.preparations.preparing()
    assert len(asked) == 1
    answers.set()
    while waits.workers.preparations.preparing():
        waits.turn()
    assert len(asked) == 2


def test_an_exception_is_logged_and_nothing_is_looked_at_again(
    restarts: Callable[..., Waits], log: pytest.LogCaptureFixture
) -> None:
    driver = Driver(OSError("the driver is upset"))
    waits = restarts(driver)
    waits.ends()
    (record,) = [record for record in log.records if record.levelno >= logging.WARNING]
    assert "checking GPU memory failed; restarts will no longer wait for it" in record.getMessage()
    assert "the driver is upset" in log.text
    waits.ends()
    assert driver.asked == 1


def test_an_exception_on_the_loop_s_thread_does_not_end_the_job(
    restarts: Callable[..., Waits], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "held_by", lambda *_: 1 / 0)
    restarts(Driver(HELD), 0.1).ends()
    assert "the wait for GPU memory failed; the job continues without it" in log.text


def test_without_a_further_thread_the_workers_start(
    restarts: Callable[..., Waits], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rallypoint.base.mailbox.start_thread", lambda *_: None)
    restarts(Driver(HELD)).ends()
    assert log.messages == [
        "starting the workers without checking GPU memory: this machine does not allow any more threads"
    ]


def test_survivors_that_are_being_ended_end_first(restarts: Callable[..., Waits]) -> None:
    driver = Driver(FREE)
    waits = restarts(driver)
    stop = SimpleNamespace(done=False)
    context: Any = SimpleNamespace(stopping=stop)
    waits.workers.pcontext = context
    waits.begin()
    waits.wait.step()
    assert waits.workers.preparations.preparing()
    assert driver.asked == 0
    stop.done = True
    while waits.workers.preparations.preparing():
        waits.turn()
    assert driver.asked == 1
    waits.workers.pcontext = None


# Where it is asked for


@pytest.mark.parametrize(
    ("devices", "visible", "sees"),
    [
        (["/none", os.devnull], None, True),
        ([os.devnull, "/none"], "0,1", True),
        ([os.devnull], "", False),
        (["/none"], None, False),
    ],
)
def test_only_where_workers_may_see_gpus(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], visible: str | None, sees: bool
) -> None:
    monkeypatch.setattr(table, "NVIDIA_DEVICES", devices)
    assert table.sees_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) is sees
