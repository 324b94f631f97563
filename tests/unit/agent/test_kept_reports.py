"""The report and each worker's last output, which an agent keeps when a job ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rallypoint.agent.launch import elastic_launch
from rallypoint.failures.report import ChildFailedError
from rallypoint.features import kept_reports as module
from rallypoint.features.job_folders import FOLDER
from rallypoint.features.kept_reports import KeptReport, RankEnd, ReportKeeper, kept_report
from rallypoint.features.local_jobs import ended_jobs
from rallypoint.rendezvous.handler import LocalJob
from tests.environment import undisturbed
from tests.processes import completed
from tests.waiting import until

BEGAN = 1e9 + 0.25
JOB = LocalJob(os.getpid(), "job", "c10d", "localhost:29400", "train.py", BEGAN, os.geteuid())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path / f"rallypoint-{os.geteuid()}"


class Output:
    files = "", "/dev/null"

    def __init__(self, stdout: bytes, stderr: bytes) -> None:
        self.last_stdout = lambda: stdout
        self.last_lines = lambda: stderr


class Workers:
    """The parts of an agent and of its workers' processes that a report needs."""

    began_at = BEGAN
    stopped = ()

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.pcontext = self
        self.exit_codes = dict.fromkeys(range(len(outputs)), 0)
        self.poll = lambda: None
        self.program_pids = lambda: {rank: 100 + rank for rank in range(len(outputs))}
        self.global_ranks = lambda: {rank: 8 + rank for rank in range(len(outputs))}
        self.output = outputs.__getitem__


def keep(*outputs: Output, error: BaseException | None = None) -> KeptReport:
    keeper = ReportKeeper(Workers(outputs))  # type: ignore[arg-type]
    keeper.on_workers_started(3)
    keeper.keep(error)
    kept = kept_report(JOB)
    assert kept is not None
    return kept


def test_output_is_kept_as_a_terminal_shows_it() -> None:
    stdout = b"\x1b[31mred\x1b[0m\n\nrank: 9\n  indented\n\ttab\n10%\r20%\nstdout:\n\xff\x07\n"
    kept = keep(Output(stdout, b""), error=ValueError("one\n\ntwo"))
    shown = ("red", "", "rank: 9", "  indented", "        tab", "20%", "stdout:", "\ufffd?")
    rank = RankEnd(8, 0, 100, 0, "succeeded", "", "", shown, ())
    assert kept == KeptReport(os.uname().nodename, 3, False, ("one", "", "two"), (rank,))


@pytest.mark.parametrize("count", [1, 8, 64, 300])
def test_reports_are_bounded(folder: Path, count: int) -> None:
    much = b"".join(b"%09d\n" % number for number in range(6500))
    kept = keep(*[Output(much, b"x" * 60000 + b"\nlast\n")] * count)
    assert all((rank.stdout[-1], rank.stderr[-1]) == ("000006499", "last") for rank in kept.ranks)
    (file,) = folder.iterdir()
    assert file.stat().st_size < 1.25 * 1024 * 1024
    assert all(len("\n".join((*rank.stdout, *rank.stderr))) <= 64 * 1024 for rank in kept.ranks)


def test_reports_are_private_and_few(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    keep()
    ours, now = {path.name for path in folder.iterdir()}, time.time()
    for number, age in enumerate((10, 20, 30, 8 * 86400)):
        name = f"report-0000000000000{number}-7{'.7.0123456789abcdef' if number == 1 else ''}"
        (folder / name).write_text("other")
        os.utime(folder / name, (now - age, now - age))
    (folder / "report").write_text("not ours")
    keep()
    kept = {path.name for path in folder.iterdir()}
    assert kept == {*ours, "report-00000000000000-7", "report-00000000000001-7.7.0123456789abcdef", "report"}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / ours.pop()).stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(module, "_KEPT", 5.0)
    keep()
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "damage", [b"", b"  x\n", b"host: a\nround: x\n", b"\xff", b"host: \x1b[2J\n", b"x" * 3_000_000]
)
def test_invalid_reports_links_and_open_folders_are_ignored(folder: Path, damage: bytes) -> None:
    keep()
    (file,) = folder.iterdir()
    moved = file.rename(folder.parent / "elsewhere")
    file.symlink_to(moved)
    assert kept_report(JOB) is None
    file.unlink()
    os.link(moved, file)
    assert kept_report(JOB) is not None
    folder.chmod(0o750)
    assert kept_report(JOB) is None
    folder.chmod(0o700)
    file.write_bytes(damage)
    assert kept_report(JOB) is None


@pytest.mark.process
def test_launches_keep_reports(capfd: pytest.CaptureFixture[str]) -> None:
    from rallypoint import LaunchConfig

    config = LaunchConfig(1, 1, 2, run_id="launched", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    program = (
        "import os, sys, time\n"
        "print('rank', os.environ['RANK'], 'is here', file=sys.stderr, flush=True)\n"
        "print('step 1', flush=True)\n"
        "if os.environ['RANK'] == '1': raise ValueError('boom')\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(ChildFailedError) as failed:
        elastic_launch(config, sys.executable)("-c", program)
    (ended,) = ended_jobs()
    assert (ended.outcome, ended.job.job, ended.round) == ("failed", "launched", 0)
    assert ended.detail.startswith("rank 1 failed on ")
    assert 0 <= ended.seconds < 60
    kept = kept_report(ended.job)
    assert kept is not None
    assert kept.has_cause
    assert "\n".join(kept.report) == str(failed.value).strip("\n")
    other, root = kept.ranks
    assert [root.rank, root.ending, root.exit_code, root.stderr[0]] == [1, "failed", 1, "rank 1 is here"]
    assert (root.stderr[-1], root.stdout) == ("ValueError: boom", ("step 1",))
    assert [other.rank, other.ending, other.exit_code] == [0, "stopped", -signal.SIGTERM]


KILLED = """
import os, sys
from pathlib import Path
from tests.waiting import until
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("the first attempt")
until(lambda: list(Path(os.environ["RALLYPOINT_JOBS_DIR"]).glob("*/report-*[0-9]")), "the report is kept")
os.kill(int(os.environ["AGENT"]), 9)
"""


@pytest.mark.process
def test_a_killed_agent_has_kept_the_last_failure(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    command = [sys.executable, "-c", "import os\nos.environ['AGENT'] = str(os.getpid())\n", "--max-restarts=1"]
    command[2] += "from rallypoint.cli.rallyrun import main\nmain()"
    root = str(Path(__file__).parents[3])
    environment = {**undisturbed(), FOLDER: str(tmp_path), "PYTHONPATH": os.pathsep.join((root, *sys.path))}
    launcher = subprocess.Popen([*command, str(script)], env=environment)
    assert launcher.wait(120) == -signal.SIGKILL
    (ended,) = until(lambda: list(ended_jobs()), "the reaper has left a record")
    assert ended.outcome == "killed"
    kept = kept_report(ended.job)
    assert kept is not None
    assert (kept.round, kept.report[-2].strip()) == (0, "ValueError: the first attempt")
    assert kept.ranks[0].stderr[-1] == "ValueError: the first attempt"
    shown = completed([sys.executable, "-m", "rallypoint.cli.rallyctl", "status", "train.py"], env=environment).stdout
    assert "its last failure before that, in round 0:" in shown
