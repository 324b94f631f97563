"""A worker that continues in the next round: what ends its function, and what the agent and the user see of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from rallypoint import inprocess
from rallypoint.inprocess import Round
from tests.processes import completed
from tests.unit.inprocess.agent import PREAMBLE, Agent, worker

process = pytest.mark.process


def test_outside_of_rallypoint_the_function_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RALLYPOINT_NOTICES", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    seen: list[tuple[Round, int, int]] = []

    @inprocess.resumable
    def train(round_: Round, first: int, *, second: int) -> str:
        """Trains."""
        seen.append((round_, first, second))
        return "done"

    assert train(1, second=2) == "done"
    ((round_, first, second),) = seen
    assert (round_.survived, round_.memory, round_.restart_count, first, second) == (False, {}, 3, 1, 2)
    assert (train.__name__, train.__doc__) == ("train", "Trains.")

    async def coroutine(_round: Round) -> None: ...

    with pytest.raises(TypeError, match="wrap the plain function"):
        inprocess.resumable(coroutine)


def test_other_threads_call_the_function_once_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_NOTICES", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    seen: list[bool] = []
    train = inprocess.resumable(lambda round_: seen.append(round_.survived))

    def run() -> None:
        with pytest.warns(RuntimeWarning, match="will be restarted when a round ends.*main thread"):
            train()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]
    assert os.listdir(tmp_path) == []


MEMORY = """
import warnings
from rallypoint import notices
@inprocess.resumable
def train(round, name):
    notices.progress(int(os.environ["RANK"]))
    round.memory.setdefault("pids", []).append(os.getpid())
    say(name, round.survived, round.restart_count, len(set(round.memory["pids"])), len(round.memory["pids"]),
        *(os.environ.get(name) for name in ("RANK", "GONE")))
    if os.environ["RANK"] == "7":
        return "value"
    time.sleep(60)
say(train("train"))
warnings.simplefilter("error")
for _ in range(100):
    inprocess.resumable(lambda round: None)()
"""


def progress(agent: Agent) -> int:
    return int.from_bytes((agent.folder / "progress.0").read_bytes()[:8], "little")


@process
def test_the_function_is_called_again_with_its_memory_and_the_new_environment(tmp_path: Path) -> None:
    with worker(tmp_path, MEMORY, RANK="3", GONE="here", TORCHELASTIC_RESTART_COUNT="0") as agent:
        assert agent.line() == "train False 0 1 1 3 here"
        assert progress(agent) == 3
        agent.next_round(4, RANK="2", GONE=None, TORCHELASTIC_RESTART_COUNT="1")
        assert agent.line() == "train True 1 1 2 2 None"
        agent.next_round(5, RANK="7", TORCHELASTIC_RESTART_COUNT="2")
        assert agent.line() == "train True 2 1 3 7 None"
        assert agent.line() == "value"
        assert agent.end() == (0, ""), "further functions can be resumable"
        assert progress(agent) == 7, "it is written to the same file"
        assert agent.fifo.exists(), "it shows that the next worker of this local rank can continue"


WAITS = """
import multiprocessing, queue, select, signal, socket, subprocess, threading
def clean_up():
    try:
        say("in")
        time.sleep(60)
    finally:
        began = time.monotonic()
        while time.monotonic() < began + 0.5:  # several more signals come
            pass
        try:
            time.sleep(0.2)
        except BaseException:
            say("cut")
        say("cleaned up")
def generate():
    while True:
        yield time.sleep(60)
def compute():
    n = 0
    while True:
        n += 1
def fail():
    try:
        time.sleep(60)
    except BaseException:
        raise ValueError("in place of the interruption")
def return_instead():
    try:
        time.sleep(60)
    except BaseException:
        return
def thread():
    found = threading.Thread(target=time.sleep, args=(60,), daemon=True)
    found.start()
    found.join()
lock = threading.Lock()
lock.acquire()
left, right = socket.socketpair()
WAITS = [lambda: time.sleep(60), lock.acquire, queue.Queue().get, queue.SimpleQueue().get,
    threading.Event().wait, compute, lambda: list(generate()), lambda: left.recv(1),
    lambda: select.select([left], [], []), thread, signal.pause, fail, return_instead]
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
def swallow():
    for turn in range(3):
        try:
            if not turn:
                say("in")
            time.sleep(60)
        except:
            say("swallowed")
ALL = [clean_up, *WAITS, enters, leaves, ends, acquires, gets, waits, enters_condition, swallow, lambda: say("in")]
@inprocess.resumable
def train(round):
    wait = ALL[int(os.environ["RANK"])]
    if wait in WAITS:
        say("in")
    wait()
train()
"""


@process
def test_all_waits_of_the_main_thread_are_interrupted(tmp_path: Path) -> None:
    with worker(tmp_path, WAITS, RANK="0") as agent:
        assert agent.line() == "in"
        assert agent.next_round(0, RANK="1") > 0.5
        assert agent.line() == "cleaned up", "without an interruption"
        for number in range(1, 21):
            assert agent.line() == "in"
            assert agent.next_round(number, RANK=str(number + 1)) < 20, number
        assert agent.line() == "in"
        agent.next_round(21, RANK="22")
        while (line := agent.line()) != "in":
            assert line == "swallowed", "up to three times"
        assert agent.end() == (0, "")


OWN_ERRORS = """
import contextlib, multiprocessing.util, signal, weakref
def fail():
    raise ConnectionError("a worker is gone")
def clean_up():
    say("in")
    for _ in range(3):
        os.read(sent, 1)  # the end of the round interrupts this process
    say("cleaned up")
def in_handler():
    try:
        fail()
    except ConnectionError:
        clean_up()
    time.sleep(60)
def in_finally():
    try:
        fail()
    finally:
        clean_up()
def in_exit():
    with contextlib.ExitStack() as stack:
        stack.callback(clean_up)
        fail()
def in_generator():
    def generate():
        try:
            yield
        finally:
            clean_up()
    generator = generate()
    next(generator)
    generator.close()
    time.sleep(60)
def in_nested_handler():
    try:
        fail()
    except ConnectionError:
        try:
            fail()
        except ConnectionError:
            pass
        clean_up()
    time.sleep(60)
def in_block():
    try:
        fail()
    except ConnectionError:
        with inprocess.uninterrupted():
            clean_up()
        say("block has ended")
    time.sleep(60)
class Batches:  # like a data loader's iterator, which only the loop holds
    def __iter__(self):
        return self
    def __next__(self):
        return 1
class Loader(Batches):
    def __del__(self):
        clean_up()
def in_iterator():
    for _ in Loader():
        fail()
def finalized(finalize):
    batches = Batches()
    finalize(batches, clean_up)
    for _ in batches:
        del batches
        fail()
def in_finalizer():
    finalized(weakref.finalize)
def in_finalizer_of_multiprocessing():
    finalized(multiprocessing.util.Finalize)
def without_error():
    say("in")
    time.sleep(60)
CASES = [in_handler, in_finally, in_exit, in_generator, in_nested_handler, in_iterator, in_finalizer,
    in_finalizer_of_multiprocessing, in_block, without_error]
@inprocess.resumable
def train(round):
    if int(os.environ["RANK"]) == len(CASES):
        return
    global sent
    sent, number = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(sent, True)
    signal.set_wakeup_fd(number)  # signals that come are written there
    CASES[int(os.environ["RANK"])]()
"""
CALLED = "train()\n"
CALLED_IN_A_HANDLER = "try:\n    raise LookupError\nexcept LookupError:\n    train()\n"


@process
@pytest.mark.parametrize("call", [CALLED, CALLED_IN_A_HANDLER], ids=["called", "called_in_a_handler"])
def test_a_clean_up_after_an_error_is_not_interrupted(tmp_path: Path, call: str) -> None:
    with worker(tmp_path, OWN_ERRORS + call, RANK="0") as agent:
        for number in range(10):
            assert agent.line() == "in"
            agent.next_round(number, RANK=str(number + 1))
            if number < 9:
                assert agent.line() == "cleaned up", number
            if number == 8:
                assert agent.line() == "block has ended"
        assert agent.end() == (0, "")


IMPORTS = """
import pathlib, tempfile, threading
ended = threading.Event()
inprocess.on_round_end(ended.set)
folder = tempfile.mkdtemp()
pathlib.Path(folder, "slow_to_import.py").write_text("import __main__; __main__.say('in'); __main__.ended.wait(); "
    "__main__.time.sleep(0.3); __main__.say('imported')")
sys.path.insert(0, folder)
sys.dont_write_bytecode = True
@inprocess.resumable
def train(round):
    import slow_to_import
    if not round.survived:
        time.sleep(60)
pathlib.Path(folder, "trains_when_imported.py").write_text("import __main__; __main__.train()")
import trains_when_imported
"""


@process
def test_an_import_is_not_interrupted(tmp_path: Path) -> None:
    with worker(tmp_path, IMPORTS, TMPDIR=str(tmp_path)) as agent:
        assert agent.line() == "in"
        agent.next_round(0)
        assert agent.line() == "imported"
        assert agent.end() == (0, "")


BLOCKS = """
import threading
from rallypoint import notices
ended = threading.Event()
inprocess.on_round_end(lambda: 1 / 0)
inprocess.on_round_end(ended.set)
def marks():
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]]
    return sum("rallypoint-saving" in link for link in links)
@inprocess.resumable
def train(round):
    if round.survived:
        return
    with notices.saving(), inprocess.uninterrupted():
        say("in")
        ended.wait()
        time.sleep(0.1)
        say("saved", marks())
    say("never")
train()
say("marks", marks())
"""


@process
def test_a_save_is_interrupted_at_its_end(tmp_path: Path) -> None:
    with worker(tmp_path, BLOCKS) as agent:
        assert agent.line() == "in"
        agent.next_round(0)
        assert [agent.line(), agent.line()] == ["saved 1", "marks 0"]
        code, errors = agent.end()
        assert code == 0
        assert "the end-of-round hook " in errors
        assert "ZeroDivisionError" in errors


RACES = """
@inprocess.resumable
def train(round):
    if os.environ["RANK"] == "fail":
        raise OSError("connection reset")
    if os.environ["RANK"] == "end":
        return
    say("in", os.environ["RANK"])
    time.sleep(60)
train()
"""


@process
def test_messages_in_quick_succession(tmp_path: Path) -> None:
    with worker(tmp_path, RACES, RANK="0") as agent:
        assert agent.line() == "in 0"
        agent.order("leave 5", "leave 5", "what is this", "leave -3", "leave x", "leave")
        agent.wait_until_left(5)
        agent.prepare(6, RANK="6")
        agent.order("enter 6", "leave 6")  # the round ends before the call
        agent.wait_until_left(6)
        agent.leave(7)  # this process never entered it
        agent.enter(9, RANK="9")
        while (line := agent.line()) != "in 9":
            assert line == "in 6", "the call of round 6 may happen or not"
        agent.next_round(9, RANK="end")
        assert agent.end() == (0, "")


@process
def test_errors_may_be_caused_by_the_death_of_another_worker(tmp_path: Path) -> None:
    with worker(tmp_path, RACES, RANK="0") as agent:
        assert agent.line() == "in 0"
        agent.next_round(0, RANK="fail")
        agent.next_round(1, RANK="2")  # the round ends a moment later
        assert agent.line() == "in 2"
        agent.next_round(2, RANK="fail")
        code, errors = agent.end()
        assert code == 1, "the round does not end: it was this worker's own failure"
        assert errors.endswith("OSError: connection reset\n")
        assert agent.fifo.exists()


EXITS = """
@inprocess.resumable
def train(round):
    try:
        say("in")
        time.sleep(60)
    finally:
        sys.exit(9)
train()
"""


@process
def test_an_exit_ends_the_process_even_after_the_round(tmp_path: Path) -> None:
    with worker(tmp_path, EXITS) as agent:
        assert agent.line() == "in"
        agent.order("leave 0")
        assert agent.end() == (9, "")


HANDLER = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"


@process
@pytest.mark.parametrize(("handler", "code"), [("", -signal.SIGTERM), (HANDLER, 5)])
def test_sigterm_ends_a_process_that_waits_for_a_round(tmp_path: Path, handler: str, code: int) -> None:
    with worker(tmp_path, handler + RACES, RANK="0") as agent:
        assert agent.line() == "in 0"
        agent.leave(0)
        agent.process.send_signal(signal.SIGTERM)
        assert agent.end() == (code, "")
        assert agent.fifo.exists()


@process
def test_files_of_a_dead_process_and_of_another_round(tmp_path: Path) -> None:
    folder = tmp_path / "notices"
    folder.mkdir(0o700)
    os.mkfifo(folder / "inprocess.0")
    with worker(tmp_path, RACES, RANK="0") as agent:
        assert agent.line() == "in 0"
        agent.next_round(0, RANK="1")
        assert agent.line() == "in 1"
        agent.leave(1)
        agent.prepare(3, RANK="1")
        agent.order("enter 2")
        code, errors = agent.end()
        assert code == 1
        assert "belongs to round 3, not to round 2" in errors


CHILDREN = """
import multiprocessing, subprocess
def child():
    try:
        time.sleep(0.5)
        say("child")
        time.sleep(60)
    finally:
        say("child interrupted")
@inprocess.resumable
def train(round):
    say("in", round.survived)
    if sys.argv[1:]:
        return
    if round.survived:
        say(round.memory["child"].is_alive())
        os.kill(round.memory["child"].pid, 9)
        return
    subprocess.run([sys.executable, "-c", CODE, "child"], check=True)
    round.memory["child"] = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    round.memory["child"].start()
    say("forked")
    time.sleep(60)
train()
"""


@process
def test_children_of_a_worker(tmp_path: Path) -> None:
    """A new process of the same local rank is not resumable, and a forked child is not interrupted."""
    with worker(tmp_path, f"CODE = {PREAMBLE + CHILDREN!r}\n" + CHILDREN) as agent:
        assert [agent.line(), agent.line(), agent.line()] == ["in False", "in False", "forked"]
        agent.leave(0)
        assert agent.line() == "child"
        agent.enter(1)
        assert [agent.line(), agent.line()] == ["in True", "True"]
        code, errors = agent.end()
        assert code == 0
        assert "another process of this local rank is already resumable" in errors


RELEASES = """
import weakref
class Model: pass
seen = []
def step(model):
    try:
        time.sleep(60)
    except BaseException as error:
        kept = error
        raise ValueError from error
@inprocess.resumable
def train(round):
    held = [reference() for reference in seen]
    model = Model()
    seen.append(weakref.ref(model))
    say("in", *held)
    if len(seen) < 3:
        step(model)
train()
"""


@process
def test_objects_of_the_function_are_released(tmp_path: Path) -> None:
    with worker(tmp_path, RELEASES) as agent:
        assert agent.line() == "in"
        agent.next_round(0)
        assert agent.line() == "in None"
        agent.next_round(1)
        assert agent.line() == "in None None"
        assert agent.end() == (0, "")


@process
def test_it_imports_no_torch_and_little_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import rallypoint.inprocess; print(*sorted(set(sys.modules) - before))"
    )
    done = completed([sys.executable, "-c", code], check=True)
    modules = set(done.stdout.split())
    assert {name for name in modules if name.startswith("rallypoint")} == {
        "rallypoint",
        "rallypoint.base",
        "rallypoint.base.light_typing",
        "rallypoint.base.private_files",
        "rallypoint.notices",
        "rallypoint.inprocess",
        *(f"rallypoint.inprocess.{name}" for name in ("aborting", "interruption", "rounds", "torch_switches")),
    }
    assert not {"logging", "torch", "msgspec", "multiprocessing"} & modules


PREPARES = """
def prepare(word):
    say("prepares", word)
    sys.stdin.readline()
    return word

@inprocess.resumable(prepare=prepare)
def train(round, word):
    say("in", os.environ.get("RANK"), os.environ.get("LOCAL_RANK"), round.survived, round.prepared)
    if os.environ.get("RANK") == "end":
        return
    time.sleep(60)
train("this")
"""


@process
def test_a_process_prepares_once(tmp_path: Path) -> None:
    with worker(tmp_path, PREPARES, RANK="0") as agent:
        assert agent.line() == "prepares this"
        agent.release()
        assert agent.line() == "in 0 0 False this"
        assert (agent.folder / "prepared.0").exists()
        agent.next_round(0, RANK="end")
        assert agent.line() == "in end 0 True this"
        assert agent.end() == (0, "")


@process
def test_a_worker_that_prepares_enters_the_current_round(tmp_path: Path) -> None:
    with worker(tmp_path, PREPARES, RANK="0") as agent:
        assert agent.line() == "prepares this"
        agent.leave(0)
        agent.enter(1, RANK="1")
        agent.leave(1)
        agent.enter(2, RANK="end")
        agent.release()
        assert agent.line() == "in end 0 False this"
        assert agent.end() == (0, "")


@process
def test_a_standby_worker_waits_for_a_rank_and_a_round(tmp_path: Path) -> None:
    with worker(tmp_path, PREPARES, LOCAL_RANK="", RALLYPOINT_STANDBY="7") as agent:
        assert agent.line() == "prepares this"
        agent.release()
        agent.wait_for("prepared.7")
        assert not agent.fifo.exists()
        standby = agent.folder / "inprocess.7"
        agent.order("rank 0", fifo=standby)
        standby.rename(agent.fifo)
        agent.next_round(0, RANK="0", LOCAL_RANK="0", RALLYPOINT_STANDBY=None)
        assert agent.line() == "in 0 0 False this"
        agent.next_round(1, RANK="end")
        assert agent.line() == "in end 0 True this"
        assert agent.end() == (0, "")


@process
def test_a_standby_worker_without_a_private_folder_ends(tmp_path: Path) -> None:
    (tmp_path / "notices").mkdir(mode=0o755)
    with worker(tmp_path, PREPARES, RALLYPOINT_STANDBY="7") as agent:
        assert agent.line() == ""
        code, errors = agent.end()
        assert code == 1
        assert "it is not a folder that only this user can access" in errors
