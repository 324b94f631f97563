"""Preloaded workers equal fresh ones, whatever a script can ask; and nothing of a zygote outlives its job."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launching import RALLYRUN, Job, Launcher
from tests.jobs.nodes import all_end, c10d

MODULES = "decimal,multiprocessing.process,random,logging,threading,socket"

PROBE = """
import faulthandler, gc, inspect, json, linecache, locale, os, resource, signal, stat, sys, threading, warnings
import multiprocessing.process as mpp

def stream(each):
    if each is None:
        return None
    raw = getattr(each.buffer, "raw", each.buffer)
    return [each.name, each.mode, each.encoding, each.errors, each.line_buffering, each.write_through, each.newlines,
            each.seekable(), each.isatty(), each.fileno(), type(each).__name__, type(each.buffer).__name__, raw.mode,
            raw.closefd, str(raw.name)]

descriptors = [f"{fd} {os.path.realpath(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
descriptors = [each for each in descriptors if "/proc" not in each]

def kinds():
    found = {}
    for fd in range(3):
        try:
            found[fd] = stat.S_IFMT(os.fstat(fd).st_mode)
        except OSError:
            found[fd] = None
    return found

main = sys.modules["__main__"]
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": list(sys.flags),
    "executable": [sys.executable, sys.prefix, sys.exec_prefix], "warnoptions": sys.warnoptions,
    "filters": [list(map(str, each)) for each in warnings.filters],
    "xoptions": sys._xoptions, "main": {name: str(value).split(" at 0x")[0] for name, value in vars(main).items()
        if name.startswith("__")}, "name": __name__, "file": __file__,
    "environ": dict(os.environ), "order": list(os.environ), "shell": os.popen("env | sort").read().splitlines(),
    "signals": {int(each): str(signal.getsignal(each)).split(" at 0x")[0] for each in signal.valid_signals()},
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    "wakeup": signal.set_wakeup_fd(-1), "umask": os.umask(0o22), "folder": os.getcwd(),
    "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "parent": open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")[-2],
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task")), threading.current_thread().name],
    "ids": [threading.main_thread().native_id == os.getpid(), threading.main_thread().ident == threading.get_ident(),
        threading.current_thread() is threading.main_thread()],
    "streams": [stream(each) for each in (sys.stdin, sys.stdout, sys.stderr)], "kinds": kinds(),
    "same": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "descriptors": descriptors, "depth": len(inspect.stack()), "gc": gc.get_threshold(),
    "collects": gc.isenabled(), "limit": sys.getrecursionlimit(), "faulthandler": faulthandler.is_enabled(),
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace()],
    "meta": [getattr(each, "__name__", type(each).__name__) for each in sys.meta_path],
    "finders": sorted(each for each in sys.path_importer_cache if not each.startswith(os.path.dirname(os.__file__))),
    "site": [name for name in sys.modules if "sitecustomize" in name or name.startswith("rallypoint")],
    "process": [mpp.current_process().name, mpp.parent_process(), mpp.ORIGINAL_DIR],
    "comm": open("/proc/self/comm").read(), "cmdline": open("/proc/self/cmdline").read(), "nice": os.nice(0),
    "cpus": sorted(os.sched_getaffinity(0)), "locale": locale.setlocale(locale.LC_ALL),
    "limits": [resource.getrlimit(each) for each in range(10)], "dumpable": status["SigIgn"],
    "seccomp": status.get("Seccomp"), "nonewprivs": status.get("NoNewPrivs"),
}
with open(f"seen-{os.environ['RANK']}.json", "w") as file:
    json.dump(seen, file)
"""

DIFFERENT = {
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",
    "MASTER_PORT",
    "RALLYPOINT_NOTICES",
    "RALLYPOINT_TEST_MARK",
}


def seen(folder: Path, rank: int = 0) -> dict[str, Any]:
    path = folder / f"seen-{rank}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    found["environ"] = {name: value for name, value in found["environ"].items() if name not in DIFFERENT}
    found["shell"] = [line for line in found["shell"] if line.partition("=")[0] not in DIFFERENT]
    return found


def alike(preloaded: dict[str, Any], fresh: dict[str, Any]) -> None:
    differing = {name: (preloaded[name], fresh[name]) for name in fresh if preloaded[name] != fresh[name]}
    assert not differing, "\n".join(
        f"{name}:\n  preloaded {pair[0]}\n  fresh {pair[1]}" for name, pair in differing.items()
    )


def run(rallyrun: Launcher, *args: str, env: dict[str, str] | None = None, code: int = 0) -> Job:
    job = rallyrun(*args, env=env)
    assert job.ends() == code, job.err
    return job


def fresh_and_preloaded(rallyrun: Launcher, *args: str, env: dict[str, str] | None = None, workers: int = 1) -> Any:
    """What each worker sees, started afresh and preloaded; of one worker if there is one."""
    found = []
    for flags in ((), (f"--preload={MODULES}",)):
        job = run(rallyrun, "--standalone", f"--nproc-per-node={workers}", *flags, *args, env=env)
        assert "without preloading" not in job.err, job.err
        found.append([seen(rallyrun.folder, rank) for rank in range(workers)])
    return found if workers > 1 else [each for (each,) in found]


def test_a_script_sees_what_it_sees_fresh(rallyrun: Launcher) -> None:
    """Rank 0 with streams as the agent has them, rank 1 with files, rank 2 with both, rank 3 with one of each."""
    flags = (f"--log-dir={rallyrun.folder}/logs", "--redirects=1:3,3:1", "--tee=2:3,3:2")
    fresh, preloaded = fresh_and_preloaded(
        rallyrun, *flags, rallyrun.script(PROBE), "a", "--b", "${local_rank}", workers=4
    )
    shown = fresh[0]["cmdline"]  # by the kernel, of all copies of the zygote, which was started as rank 0 would be
    for rank, (of_preloaded, of_fresh) in enumerate(zip(preloaded, fresh, strict=True)):
        assert of_preloaded.pop("cmdline") == shown
        assert of_fresh.pop("cmdline").endswith(f"\0a\0--b\0{rank}\0")
        alike(of_preloaded, of_fresh)
    files = [[stat.S_ISREG(each["kinds"][fd]) for fd in "12"] for each in fresh]
    assert files[:2] == [[False, False], [True, True]]
    assert files[3][0], "and so is its standard output"


def test_a_relative_script_and_its_own_modules(rallyrun: Launcher) -> None:
    (rallyrun.folder / "beside.py").write_text("import sys\nsys.modules['__main__'].__dict__\nVALUE = __file__\n")
    rallyrun.script(PROBE + "\nimport beside; assert beside.VALUE == os.path.join(os.getcwd(), 'beside.py')\n")
    job = run(rallyrun, "--standalone", f"--preload={MODULES},beside", "script.py")
    assert "without preloading" not in job.err
    preloaded = seen(rallyrun.folder)
    run(rallyrun, "--standalone", "script.py")
    alike(preloaded, seen(rallyrun.folder))


def test_a_module(rallyrun: Launcher) -> None:
    package = rallyrun.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "probe.py").write_text(PROBE)
    fresh, preloaded = fresh_and_preloaded(rallyrun, "-m", "package.probe", "x")
    alike(preloaded, fresh)
    (package / "__main__.py").write_text(PROBE)
    fresh, preloaded = fresh_and_preloaded(rallyrun, "package")
    alike(preloaded, fresh)


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONPATH": "{folder}/more", "PYTHONHASHSEED": "7", "PYTHONWARNINGS": "ignore", "PYTHONOPTIMIZE": "1"}
        | {"PYTHONIOENCODING": "latin-1:replace", "PYTHONNOUSERSITE": "1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONSAFEPATH": "1"},
        {"PYTHONDEVMODE": "1"},
    ],
    ids=" ".join,
)
def test_what_the_environment_says(rallyrun: Launcher, env: dict[str, str]) -> None:
    env = {name: value.format(folder=rallyrun.folder) for name, value in env.items()}
    fresh, preloaded = fresh_and_preloaded(rallyrun, rallyrun.script(PROBE), env=env)
    alike(preloaded, fresh)


def test_a_sitecustomize_of_the_users(rallyrun: Launcher) -> None:
    more = rallyrun.folder / "more"
    more.mkdir()
    (more / "sitecustomize.py").write_text("import os\nos.write(1, f'custom {os.environ[\"RANK\"]}\\n'.encode())\n")
    env = {"PYTHONPATH": str(more)}
    fresh, preloaded = fresh_and_preloaded(rallyrun, rallyrun.script(PROBE), env=env)
    alike(preloaded, fresh)
    assert preloaded["site"] == ["sitecustomize"]
    assert rallyrun.jobs[-1].out == ["custom 0"]


def test_inherited_signals_and_descriptors(rallyrun: Launcher) -> None:
    script = rallyrun.script(PROBE)
    found = []
    for flags in ([], [f"--preload={MODULES}"]):
        command = " ".join([*RALLYRUN, "--standalone", "--redirects=1", "--log-dir=logs", *flags, script])
        job = rallyrun.command(["sh", "-c", f"umask 027; trap '' HUP USR1 INT; exec {command} <&-"])
        assert job.ends() == 0, job.err
        found.append(seen(rallyrun.folder))
    alike(found[1], found[0])
    assert found[0]["streams"][1][7] is True, "a file can be sought in"


FAILURES = {
    "sys.exit(3)": 3,
    "sys.exit('a text')": 1,
    "raise KeyError('x')": 1,
    "os.kill(os.getpid(), 15)": -15,
    "os.abort()": -6,
    "import ctypes; ctypes.string_at(0)": -11,
    "raise KeyboardInterrupt": -2,
    "os._exit(7)": 7,
    "def f():\n    1 / 0\nf()": 1,
}
"""What a worker does, and the exit code that its agent sees."""
SUCCESSES = [
    "sys.exit()",
    "atexit.register(print, 'at exit')",
    "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    "sys.stdout.write('no end of line')",
    "import warnings; warnings.warn('old', DeprecationWarning)",
    "traceback.print_stack()",
]
ENDING = """
import atexit, os, sys, threading, time, traceback
print("begun")
path = f"{os.environ[sys.argv[1]]}.py"
exec(compile(open(path).read(), path, "exec"))
"""


def endings(rallyrun: Launcher, texts: Iterable[str], chosen_by: str, *flags: str, code: int) -> list[list[str]]:
    """Run workers, fresh and preloaded, that end as the texts say. Returns the lines of both runs.

    Args:
        chosen_by: the variable that has the number of a worker's text.
    """
    for number, text in enumerate(texts):
        rallyrun.script(f"{text}\n", f"{number}.py")
    script, found = rallyrun.script(ENDING), []
    for preload in ((), (f"--preload={MODULES}",)):
        job = run(rallyrun, "--standalone", *preload, *flags, script, chosen_by, code=code)
        assert "without preloading" not in job.err, job.err
        found.append([*job.out, *_without_numbers(job.err).split("\n")])
    return found


def _by_writer(lines: list[str]) -> tuple[list[str], str]:
    """The agent's lines, and all that workers wrote: a line that is written in pieces may have the agent's in it."""
    text, ours = "\n".join(lines), re.compile(r"[EWI] rallypoint/.*\n")
    return ours.findall(text), ours.sub("", text)


def test_failures_are_those_of_a_fresh_worker(rallyrun: Launcher) -> None:
    """One after another, by restarts; the line of each tells its cause, and the report the last."""
    restarts = f"--max-restarts={len(FAILURES) - 1}"
    fresh, preloaded = endings(rallyrun, FAILURES, "TORCHELASTIC_RESTART_COUNT", restarts, code=1)
    assert _by_writer(preloaded) == _by_writer(fresh)
    exits = re.findall(r"failed \(exitcode: (-?\d+)\)", "\n".join(fresh))
    assert [int(each) for each in exits] == list(FAILURES.values())
    assert fresh.count("begun") == len(FAILURES)


def test_successes_are_those_of_a_fresh_worker(rallyrun: Launcher) -> None:
    """Side by side; each line names its worker."""
    flags = ("--tee=3", f"--log-dir={rallyrun.folder}/logs", f"--nproc-per-node={len(SUCCESSES)}")
    fresh, preloaded = endings(rallyrun, SUCCESSES, "RANK", *flags, code=0)
    assert sorted(preloaded) == sorted(fresh)
    for rank, said in enumerate(("begun", "at exit", "thread", "no end of line", "DeprecationWarning: old", "File ")):
        assert any(line.startswith(f"[default{rank}]:") and said in line for line in fresh), (said, fresh)


def _without_numbers(text: str) -> str:
    text = re.sub(r"([EW])\d{4} [\d:.]+ \d+ (?=rallypoint/)", r"\1 ", text)
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r"time +: \S+", "time", text)
    return re.sub(r"(pid: |PID |[Pp]rocess )\d+", r"\1N", text)


def test_what_the_imports_wrote_and_set_is_each_workers_own(rallyrun: Launcher) -> None:
    (rallyrun.folder / "loud.py").write_text(
        "import os, sys, warnings\nprint('imported')\nprint('careful', file=sys.stderr)\n"
        "os.environ.setdefault('LOUD', 'yes'); os.environ.pop('GONE', None)\n"
    )
    script = rallyrun.script(
        'import os, loud\nos.write(1, f\'{os.environ["LOUD"]} {"GONE" in os.environ}\\n\'.encode())\n'
    )
    job = run(rallyrun, "--standalone", "--nproc-per-node=2", "--preload=loud", script, env={"GONE": "1"})
    assert sorted(job.out) == ["imported"] * 2 + ["yes False"] * 2
    assert job.err.count("careful") == 2


def test_each_worker_draws_its_own_numbers(rallyrun: Launcher) -> None:
    script = rallyrun.script(
        "import random, os, multiprocessing, numpy, tempfile, uuid\n"
        "drawn = [random.random(), numpy.random.random(), multiprocessing.current_process().authkey.hex()]\n"
        "os.write(1, (' '.join(map(str, drawn)) + '\\n').encode())\n"
    )
    job = run(rallyrun, "--standalone", "--nproc-per-node=2", "--preload=random,numpy,multiprocessing", script)
    assert "without preloading" not in job.err, job.err
    first, second = (line.split() for line in job.out)
    assert not {*first} & {*second}


MULTIPROCESSING = """
import multiprocessing, os, sys

def work(queue):
    queue.put((os.getppid(), __name__, os.environ["RANK"], sys.argv))

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        parent, name, rank, argv = queue.get()
        process.join()
        print(method, process.name, name, rank, process.exitcode, parent == os.getpid(), argv, flush=True)
"""


def test_multiprocessing_in_a_worker(rallyrun: Launcher) -> None:
    script = rallyrun.script(MULTIPROCESSING)
    outs = []
    # A fork server listens in the temporary folder, on a path that the kernel lets be short only.
    env = {"TMPDIR": "/tmp"}
    for flags in ((), ("--preload=multiprocessing,multiprocessing.queues",)):
        job = run(rallyrun, "--standalone", *flags, script, "x", env=env)
        assert not job.err, job.err
        outs.append(job.out)
    assert outs[0] == outs[1]
    assert len(outs[0]) == 3


# When workers start without preloading


def says_not_preloaded(job: Job) -> str:
    (line,) = [line for line in job.err.split("\n") if "start without preloading" in line]
    return line


def test_functions_are_not_preloaded(rallyrun: Launcher) -> None:
    script = rallyrun.script(
        "from rallypoint import Features, LaunchConfig, elastic_launch\n"
        "def f():\n    return 5\n"
        "if __name__ == '__main__':\n"
        "    config = LaunchConfig(1, 1, 1, run_id='x', rdzv_backend='c10d', rdzv_endpoint='localhost:0',"
        " features=Features.of(preload=('json',)))\n    print(elastic_launch(config, f)())\n"
    )
    job = rallyrun.command([sys.executable, script])
    assert job.ends() == 0, job.err
    assert job.out == ["{0: 5}"]
    assert "they are functions" in says_not_preloaded(job)


# Restarts, and what becomes of the zygote

STAYING = """
import os, signal, sys
finish = os.path.exists("finish")  # before it says that it is up: a test lets only those finish that start later
os.write(1, f"up {os.environ['RANK']} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()} {os.getppid()} "
    f"{'decimal' in sys.modules}\\n".encode())
if finish: sys.exit()
signal.pause()
"""


class Staying:
    """A job whose workers stay, with a zygote."""

    def __init__(self, rallyrun: Launcher, *flags: str) -> None:
        self.folder = rallyrun.folder
        script = rallyrun.script(STAYING)
        flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=5", "--preload=decimal", *flags)
        self.job = rallyrun(*flags, script, env={"LOGLEVEL": "INFO"})

    def up(self, starts: int) -> list[list[str]]:
        """Wait for so many starts of both workers; the words of the last."""
        wanted = 2 * starts
        lines = self.job.until(lambda lines: sum(each.startswith("up") for each in lines) >= wanted, f"{wanted} up")
        return [line.split() for line in lines if line.startswith("up")][-2:]

    def zygote(self) -> int:
        """The pid of the last zygote that has got ready."""
        self.job.until_err("workers will be forked from process")
        found: list[str] = re.findall(r"workers will be forked from process (\d+)", self.job.err)
        return int(found[-1])

    def finish(self) -> None:
        (self.folder / "finish").touch()


def test_restarted_workers_are_forked_and_the_reaper_is_their_parent(rallyrun: Launcher) -> None:
    job = Staying(rallyrun)
    first = job.up(1)
    zygote = job.zygote()
    job.finish()
    os.kill(int(first[0][3]), signal.SIGKILL)
    again = job.up(2)
    assert job.job.ends() == 0, job.job.err
    assert [words[5] for words in first + again] == ["True"] * 4
    assert len({words[4] for words in first + again}) == 1
    assert str(zygote) not in {words[4] for words in first}
    assert f"process {zygote}" in job.job.err
    assert "without preloading" not in job.job.err


def test_a_killed_reaper_takes_the_zygote_along_and_the_next_has_one_too(rallyrun: Launcher) -> None:
    job = Staying(rallyrun)
    first = job.up(1)
    zygote = job.zygote()
    os.kill(int(first[0][4]), signal.SIGKILL)
    job.up(2)
    rallyrun.until_gone(zygote)
    job.job.until(lambda _: job.zygote() != zygote, "another zygote is ready")
    job.finish()
    os.kill(int(job.up(2)[0][3]), signal.SIGKILL)
    again = job.up(3)
    assert job.job.ends() == 0, job.job.err
    assert [words[5] for words in again] == ["True"] * 2


def test_a_spare_keeps_its_zygote_ready_while_it_waits(rallyrun: Launcher) -> None:
    conf = "last_call_timeout=1"
    job = c10d(rallyrun, "1:2", "--preload=decimal", conf=conf, env={"LOGLEVEL": "INFO"})
    a, b = job.up(hosted=True)
    spare = job.start("S")
    spare.job.until_err("waits as a spare")
    spare.job.until_err("workers will be forked from process")
    before = len(a.ups)  # more than one if the others came late
    b.dies()
    for node, starts in ((a, before + 1), (spare, 1)):
        node.comes_up(1, starts=starts, world_size=2)
        assert is_forked(int(node.ups[-1]["pid"]))
        assert "without preloading" not in node.job.err
    job.say("finish")
    all_end([a, spare], 0)


READING = """
import os, sys
early = "decimal" in sys.modules
import beside, decimal, signal
from rallypoint import notices

def main():
    import fractions
    finish = os.path.exists("finish")  # before it says that it is up: a test lets only those finish that start later
    os.write(1, f"up {os.environ['RANK']} {early} {os.getpid()}\\n".encode())
    notices.progress(1)
    if not finish:
        signal.pause()

if __name__ == "__main__":
    main()
"""


def test_what_a_script_imports_is_preloaded_once_its_workers_make_progress(rallyrun: Launcher) -> None:
    """Workers that are started again are forked: from copies that wait, and when those are used up as well."""
    (rallyrun.folder / "beside.py").write_text("import os\nos.write(1, b'beside\\n')\n")
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=3", "--preload=auto")
    job = rallyrun(*flags, rallyrun.script(READING), env={"LOGLEVEL": "INFO"})

    def up(starts: int) -> list[list[str]]:
        lines = job.until(lambda lines: sum(each.startswith("up") for each in lines) >= 2 * starts, f"{starts} starts")
        return [line.split() for line in lines if line.startswith("up")][2 * (starts - 1) :]

    workers = up(1)
    assert [words[2] for words in workers] == ["False"] * 2
    job.until_err("workers will be forked from process")
    for starts in (2, 3):
        os.kill(int(workers[0][3]), signal.SIGKILL)
        workers = up(starts)
        assert [words[2] for words in workers] == ["True"] * 2
        assert all(is_forked(int(words[3])) for words in workers)
    (rallyrun.folder / "finish").touch()
    os.kill(int(workers[0][3]), signal.SIGKILL)
    assert job.ends() == 0, job.err
    assert [line for line in job.out if line == "beside"] == ["beside"] * 8, "the user's own are never preloaded"
    assert job.err.count("Preloaded for restarted workers: ") == 1
    assert "without preloading" not in job.err


def is_forked(worker: int) -> bool:
    """The kernel shows the environment with which a process began its program: a worker's own, or the zygote's."""
    return b"\0RANK=" not in Path(f"/proc/{worker}/environ").read_bytes()


def test_an_agent_ended_while_the_modules_are_imported(rallyrun: Launcher) -> None:
    (rallyrun.folder / "slow.py").write_text(
        "import os, time\nopen('importing', 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    path = rallyrun.folder / "importing"
    os.mkfifo(path)
    job = rallyrun("--standalone", "--preload=slow", rallyrun.script("print('never')"))
    importing = int(path.read_text())  # which waits for it
    job.signal(signal.SIGTERM)
    assert job.ends() == 1
    assert job.out == []
    rallyrun.until_gone(importing)
