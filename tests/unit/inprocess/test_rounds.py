"""A worker that goes on in the next round: what ends its function, and what the agent and the user see of it."""

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
from tests.unit.inprocess.agent import PREAMBLE, worker

process = pytest.mark.process


def test_outside_of_rallypoint_it_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_would_only_make_an_object_is_refused() -> None:
    async def coroutine(_round: Round) -> None: ...

    with pytest.raises(TypeError, match="wrap the plain function"):
        inprocess.resumable(coroutine)


def test_on_another_thread_it_is_called_once_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
@inprocess.resumable
def train(round, name):
    round.memory.setdefault("pids", []).append(os.getpid())
    say(name, round.survived, round.restart_count, len(set(round.memory["pids"])), len(round.memory["pids"]),
        *(os.environ.get(each) for each in ("RANK", "GONE")))
    if os.environ["RANK"] == "7":
        return "value"
    time.sleep(60)
say(train("train"))
"""


@process
def test_the_function_is_called_again_with_its_memory_and_the_new_environment(tmp_path: Path) -> None:
    with worker(tmp_path, MEMORY, RANK="3", GONE="here", TORCHELASTIC_RESTART_COUNT="0") as agent:
        assert agent.line() == "train False 0 1 1 3 here"
        agent.next_round(4, RANK="2", GONE=None, TORCHELASTIC_RESTART_COUNT="1")
        assert agent.line() == "train True 1 1 2 2 None"
        agent.next_round(5, RANK="7", TORCHELASTIC_RESTART_COUNT="2")
        assert agent.line() == "train True 2 1 3 7 None"
        assert agent.line() == "value"
        assert agent.end() == (0, "")
        assert agent.fifo.exists(), "so that the agent knows that the next one of this local rank can go on"


MANY = """
import warnings
warnings.simplefilter("error")
train = inprocess.resumable(lambda round: None)
for _ in range(100):
    train()
"""


@process
def test_functions_one_after_the_other_can_all_go_on(tmp_path: Path) -> None:
    with worker(tmp_path, MANY) as agent:
        assert agent.end() == (0, "")


WAITS = """
import queue, select, signal, socket, threading
def swallow():
    for turn in range(3):
        try:
            if not turn:
                say("in")
            time.sleep(60)
        except:
            say("swallowed")
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
WAITS = [lambda: time.sleep(60), lock.acquire, queue.Queue().get, queue.SimpleQueue().get, threading.Event().wait,
    compute, lambda: list(generate()), lambda: left.recv(1), lambda: select.select([left], [], []), thread,
    signal.pause, fail, return_instead, swallow]
@inprocess.resumable
def train(round):
    wait = WAITS[int(os.environ["RANK"])]
    if wait is not swallow:
        say("in")
    wait()
train()
"""


@process
def test_whatever_the_main_thread_waits_for_it_comes_out(tmp_path: Path) -> None:
    with worker(tmp_path, WAITS, RANK="0") as agent:
        for number in range(13):
            assert agent.line() == "in"
            assert agent.next_round(number, RANK=str(number + 1)) < 20, number
        assert agent.line() == "in"
        agent.next_round(13, RANK="0")
        while (line := agent.line()) != "in":
            assert line == "swallowed", "up to three times; it may have come between two of them"


CLEAN_UP = """
@inprocess.resumable
def train(round):
    try:
        say("in")
        time.sleep(60)
    finally:
        began = time.monotonic()
        while time.monotonic() < began + 0.5:   # in which several more signals come
            pass
        try:
            time.sleep(0.2)
        except BaseException:
            say("cut")
        say("cleaned up")
train()
"""


@process
def test_a_clean_up_is_not_cut(tmp_path: Path) -> None:
    with worker(tmp_path, CLEAN_UP) as agent:
        assert agent.line() == "in"
        assert agent.next_round(0) > 0.5
        assert [agent.line(), agent.line()] == ["cleaned up", "in"]


OWN_ERRORS = """
import contextlib, multiprocessing.util, signal, weakref
def fail():
    raise ConnectionError("a worker is gone")
def clean_up():
    say("in")
    for _ in range(3):
        os.read(sent, 1)  # the end of the round has interrupted this process
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
class Batches:  # as a data loader's iterator: no frame holds it but the loop, which an error leaves
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
def test_a_clean_up_after_an_error_of_the_function_is_not_cut(tmp_path: Path, call: str) -> None:
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
def test_an_import_is_not_cut(tmp_path: Path) -> None:
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
    return sum("rallypoint-saving" in each for each in links)
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
def test_a_save_is_not_cut_and_the_interruption_comes_at_its_end(tmp_path: Path) -> None:
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
def test_orders_in_quick_succession(tmp_path: Path) -> None:
    with worker(tmp_path, RACES, RANK="0") as agent:
        assert agent.line() == "in 0"
        agent.order("leave 5", "leave 5", "what is this", "leave -3", "leave x", "leave")
        agent.wait_until_left(5)
        agent.prepare(6, RANK="6")
        agent.order("enter 6", "leave 6")  # it has ended before the function was called
        agent.wait_until_left(6)
        agent.leave(7)  # a round in which this process never was
        agent.enter(9, RANK="9")
        while (line := agent.line()) != "in 9":
            assert line == "in 6", "it may have been called, or not"
        agent.next_round(9, RANK="end")
        assert agent.end() == (0, "")


@process
def test_what_comes_out_may_be_the_echo_of_another_workers_death(tmp_path: Path) -> None:
    with worker(tmp_path, RACES, RANK="0") as agent:
        assert agent.line() == "in 0"
        agent.next_round(0, RANK="fail")
        agent.next_round(1, RANK="2")  # told of a moment after
        assert agent.line() == "in 2"
        agent.next_round(2, RANK="fail")
        code, errors = agent.end()
        assert code == 1, "nobody tells of anything: it was this worker's own failure"
        assert errors.endswith("OSError: connection reset\n")
        assert agent.fifo.exists()


@process
def test_an_exit_ends_the_process_even_after_the_round(tmp_path: Path) -> None:
    code = """
@inprocess.resumable
def train(round):
    try:
        say("in")
        time.sleep(60)
    finally:
        sys.exit(9)
train()
"""
    with worker(tmp_path, code) as agent:
        assert agent.line() == "in"
        agent.order("leave 0")
        assert agent.end() == (9, "")


@process
@pytest.mark.parametrize("handler", ["", "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"])
def test_sigterm_ends_a_process_that_waits_for_a_round(tmp_path: Path, handler: str) -> None:
    with worker(tmp_path, handler + RACES, RANK="0") as agent:
        assert agent.line() == "in 0"
        agent.leave(0)
        agent.process.send_signal(signal.SIGTERM)
        assert agent.end() == (5 if handler else -signal.SIGTERM, "")
        assert agent.fifo.exists()


@process
def test_a_round_that_cannot_be_read_ends_the_process(tmp_path: Path) -> None:
    with worker(tmp_path, RACES, RANK="0") as agent:
        assert agent.line() == "in 0"
        agent.leave(0)
        agent.prepare(3, RANK="1")
        agent.order("enter 1")
        code, errors = agent.end()
        assert code == 1
        assert "belongs to round 3, not to round 1" in errors


FORKS = """
import multiprocessing, threading
def child(number):
    try:
        time.sleep(0.5)
        say("child", number)
        time.sleep(60)
    finally:
        say("child interrupted")
@inprocess.resumable
def train(round):
    if "child" not in round.memory:
        found = multiprocessing.get_context("fork").Process(target=child, args=(1,), daemon=True)
        found.start()
        round.memory["child"] = found
    say("in", round.memory["child"].is_alive())
    if os.environ["RANK"] == "1":
        os.kill(round.memory["child"].pid, 9)
        return
    time.sleep(60)
if os.environ.get("SECOND") and os.fork() == 0:
    time.sleep(0.2)
    train()
train()
"""


@process
def test_a_forked_child_lives_on_and_is_not_interrupted(tmp_path: Path) -> None:
    with worker(tmp_path, FORKS, RANK="0") as agent:
        assert agent.line() == "in True"
        agent.leave(0)
        assert agent.line() == "child 1"
        agent.enter(1, RANK="1")
        assert agent.line() == "in True"
        assert agent.end() == (0, "")


SPAWNED = """
@inprocess.resumable
def train(round):
    say("in", round.survived)
    if sys.argv[1:] or round.survived:
        return
    import subprocess
    subprocess.run([sys.executable, "-c", CODE, "child"], check=True)
    time.sleep(60)
train()
"""


@process
def test_one_process_speaks_for_a_local_rank(tmp_path: Path) -> None:
    code = PREAMBLE + SPAWNED
    with worker(tmp_path, f"CODE = {code!r}\n" + SPAWNED) as agent:
        assert [agent.line(), agent.line()] == ["in False", "in False"]
        agent.next_round(0)
        assert agent.line() == "in True"
        code_, errors = agent.end()
        assert code_ == 0
        assert "another process of this local rank is already resumable" in errors


@process
def test_what_a_dead_process_has_left_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "notices"
    folder.mkdir(0o700)
    os.mkfifo(folder / "inprocess.0")
    with worker(tmp_path, RACES, RANK="0") as agent:
        assert agent.line() == "in 0"
        agent.next_round(0, RANK="end")
        assert agent.end() == (0, "")


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
    held = [each() for each in seen]
    model = Model()
    seen.append(weakref.ref(model))
    say("in", *held)
    if len(seen) < 3:
        step(model)
train()
"""


@process
def test_what_the_function_held_is_released(tmp_path: Path) -> None:
    with worker(tmp_path, RELEASES) as agent:
        assert agent.line() == "in"
        agent.next_round(0)
        assert agent.line() == "in None"
        agent.next_round(1)
        assert agent.line() == "in None None"
        assert agent.end() == (0, "")


@process
def test_progress_goes_on_in_the_same_file(tmp_path: Path) -> None:
    code = """
from rallypoint import notices
@inprocess.resumable
def train(round):
    notices.progress(int(os.environ["RANK"]))
    say("in")
    if os.environ["RANK"] == "7":
        return
    time.sleep(60)
train()
"""
    with worker(tmp_path, code, RANK="3") as agent:
        assert agent.line() == "in"
        path = agent.folder / "progress.0"
        assert path.read_bytes()[:8] == (3).to_bytes(8, "little")
        agent.next_round(0, RANK="7")
        assert agent.line() == "in"
        assert agent.end() == (0, "")
        assert path.read_bytes()[:8] == (7).to_bytes(8, "little")


@process
def test_it_brings_no_torch_along_and_little_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import rallypoint.inprocess; print(*sorted(set(sys.modules) - before))"
    )
    done = completed([sys.executable, "-c", code], check=True)
    modules = set(done.stdout.split())
    assert {each for each in modules if each.startswith("rallypoint")} == {
        "rallypoint",
        "rallypoint.base",
        "rallypoint.base.light_typing",
        "rallypoint.base.private_files",
        "rallypoint.notices",
        "rallypoint.inprocess",
        *(f"rallypoint.inprocess.{each}" for each in ("aborting", "interruption", "rounds", "torch_switches")),
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
def test_what_is_prepared_is_prepared_once_in_a_process(tmp_path: Path) -> None:
    with worker(tmp_path, PREPARES, RANK="0") as agent:
        assert agent.line() == "prepares this"
        agent.says_on()
        assert agent.line() == "in 0 0 False this"
        assert (agent.folder / "prepared.0").exists()
        agent.next_round(0, RANK="end")
        assert agent.line() == "in end 0 True this"
        assert agent.end() == (0, "")


@process
def test_who_prepares_leaves_a_round_at_once_and_enters_the_present_one_when_it_is_done(tmp_path: Path) -> None:
    with worker(tmp_path, PREPARES, RANK="0") as agent:
        assert agent.line() == "prepares this"
        agent.leave(0)
        agent.enter(1, RANK="1")
        agent.leave(1)
        agent.enter(2, RANK="end")
        agent.says_on()
        assert agent.line() == "in end 0 False this"
        assert agent.end() == (0, "")


@process
def test_a_standby_worker_waits_for_a_rank_and_a_round(tmp_path: Path) -> None:
    with worker(tmp_path, PREPARES, LOCAL_RANK="", RALLYPOINT_STANDBY="7") as agent:
        assert agent.line() == "prepares this"
        agent.says_on()
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
def test_a_standby_worker_that_cannot_be_told_ends_and_calls_nothing(tmp_path: Path) -> None:
    (tmp_path / "notices").mkdir(mode=0o755)
    with worker(tmp_path, PREPARES, RALLYPOINT_STANDBY="7") as agent:
        assert agent.line() == ""
        code, errors = agent.end()
        assert code == 1
        assert "it is not a folder that only this user can access" in errors
