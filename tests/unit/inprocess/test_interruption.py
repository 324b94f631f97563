"""Where `RoundEnded` is raised: never between taking something and giving it back, wherever the signal arrives."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import pytest

from rallypoint.inprocess.interruption import Place, cuts_in_between
from tests.interrupts import interrupt_everywhere
from tests.unit.inprocess.agent import worker


class Switch:
    """Is switched by calls, and counts what is not switched back."""

    def __init__(self) -> None:
        self.on = 0
        self.reached = 0
        """How often a body was reached."""

    def set(self, change: int) -> None:
        self.on += change

    def change(self) -> None:
        self.reached += 1

    # As a lock

    def acquire(self) -> bool:
        self.set(1)
        self.change()
        return True

    def release(self) -> None:
        self.change()
        self.set(-1)

    # As a context manager

    def __enter__(self) -> Switch:
        self.change()
        self.set(1)
        self.change()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.change()
        self.set(-1)

    @contextlib.contextmanager
    def generator(self) -> Iterator[None]:
        self.change()
        self.set(1)
        try:
            self.change()
            yield
        finally:
            self.change()
            self.set(-1)


class Guard:
    """Switches when it is made, as `torch.set_grad_enabled` does."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        switch.set(1)

    def __enter__(self) -> None:
        self.switch.change()

    def __exit__(self, *_: object) -> None:
        self.switch.set(-1)


def in_with(switch: Switch) -> None:
    with switch:
        switch.change()
    switch.change()


def in_one_line(switch: Switch) -> None:
    with switch: switch.change()  # noqa: E701 # fmt: skip


def in_several(switch: Switch) -> None:
    with (
        switch,
        Guard(switch),
        switch.generator(),
    ):
        switch.change()


def nested(switch: Switch) -> None:
    for _ in range(2):
        with switch.generator():
            with Guard(switch):
                switch.change()
            if switch.reached:
                continue
        switch.change()


def in_stack(switch: Switch) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(switch)
        stack.enter_context(switch.generator())
        switch.change()


def returned(switch: Switch) -> int:
    with switch:
        try:
            return switch.reached
        finally:
            switch.change()


def paired(switch: Switch) -> None:
    switch.acquire()
    try:
        switch.change()
    finally:
        switch.change()
        switch.release()


def paired_by_other_names(switch: Switch) -> None:
    """As much of torch's own code does."""
    switch.change()
    switch.on = before = sum((switch.on, 1))
    try:
        switch.change()
    finally:
        for _ in range(1):
            switch.change()
        switch.on = before - 1


def tried(switch: Switch) -> None:
    if not switch.acquire():
        raise queue.Empty
    try:
        switch.change()
    except LookupError:
        switch.change()
    finally:
        switch.release()


def caught(switch: Switch) -> None:
    with switch:
        try:
            raise LookupError
        except LookupError:
            switch.change()
        switch.change()


def comprehended(switch: Switch) -> None:
    with switch:
        switch.reached = sum([each + len(str(each)) for each in range(3)])


FUNCTIONS = [
    in_with,
    in_one_line,
    in_several,
    nested,
    in_stack,
    returned,
    paired,
    paired_by_other_names,
    tried,
    caught,
    comprehended,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_what_is_switched_is_switched_back_wherever_it_is_interrupted(function: Callable[[Switch], object]) -> None:
    switches: list[Switch] = []

    def call() -> None:
        switches.append(Switch())
        function(switches[-1])

    def spares(places: list[Place]) -> bool:
        return sys.exc_info()[1] is not None or cuts_in_between(places[:-1])  # without `call`

    bodies = 0
    for place, _ in interrupt_everywhere(call, spares):
        if switches:
            assert switches[-1].on == 0, place
            bodies += switches[-1].reached > 0
    assert bodies, "the bodies are interrupted"
    switches.clear()
    assert any(call_cut(call, switches)), "without that, something is left on"


def call_cut(call: Callable[[], object], switches: list[Switch]) -> Iterator[bool]:
    """Whether it is left on, for each place at which it could be interrupted."""
    for _ in interrupt_everywhere(call):
        yield bool(switches) and switches[-1].on != 0


LOCKS = [threading.Lock, threading.RLock, threading.Condition, multiprocessing.Lock]


@pytest.mark.parametrize("kind", LOCKS, ids=["lock", "rlock", "condition", "process_lock"])
def test_no_lock_is_left_held(kind: Callable[[], threading.Lock]) -> None:
    lock = kind()
    done: list[int] = []

    def call() -> None:
        with lock:
            done.append(1)
        if not lock.acquire(timeout=5):
            raise TimeoutError
        try:
            done.append(2)
        finally:
            lock.release()

    for place, _ in interrupt_everywhere(call, lambda places: sys.exc_info()[1] is not None or cuts_in_between(places)):
        assert free(lock), place


def free(lock: threading.Lock) -> bool:
    """Whether another thread can take it."""
    found: list[bool] = []

    def take() -> None:
        found.append(lock.acquire(timeout=0.01))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


WAITS = """
import multiprocessing, queue, subprocess, threading
class Waits:
    def __enter__(self):
        say("in")
        time.sleep(60)
    def __exit__(self, *_):
        pass
class WaitsAtTheEnd(Waits):
    __enter__, __exit__ = Waits.__exit__, lambda self, *_: Waits.__enter__(self)
def enters():
    with Waits():
        pass
def leaves():
    with WaitsAtTheEnd():
        pass
def ends():
    try:
        pass
    finally:
        say("in")
        time.sleep(60)
def acquires():
    lock = multiprocessing.Lock()
    lock.acquire()
    say("in")
    lock.acquire()
    try:
        pass
    finally:
        lock.release()
def gets():
    say("in")
    multiprocessing.Queue().get(timeout=60)
def waits():
    say("in")
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            child.wait()
        finally:
            child.kill()
def enters_condition():
    condition, entered = threading.Condition(), threading.Event()
    def hold():
        with condition:
            entered.set()
            time.sleep(60)
    threading.Thread(target=hold, daemon=True).start()
    entered.wait()
    say("in")
    with condition:
        pass
CASES = [enters, leaves, ends, acquires, gets, waits, enters_condition]
@inprocess.resumable
def train(round):
    if int(os.environ["RANK"]) < len(CASES):
        CASES[int(os.environ["RANK"])]()
train()
"""


@pytest.mark.process
def test_what_waits_is_interrupted_there_too(tmp_path: Path) -> None:
    with worker(tmp_path, WAITS, RANK="0") as agent:
        for number in range(7):
            assert agent.line() == "in"
            assert agent.next_round(number, RANK=str(number + 1)) < 20, number
        assert agent.end() == (0, "")
