"""The flags about devices and output, with the same workers under real torchrun 2.13 and under rallyrun."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conformance.record import Record
from tests.jobs.launching import RALLYRUN, Launcher

pytestmark = pytest.mark.torch

TORCHRUN = [str(Path(sys.executable).parent / "torchrun")]

SEEN = """
import json, os
names = ("LOCAL_RANK", "RANK", "CUDA_VISIBLE_DEVICES")
folder = os.path.basename(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))
os.write(1, f"{json.dumps({name: os.environ.get(name) for name in names})} {folder}\\n".encode())
"""

TALK = r"""
import os, sys
rank = os.environ["RANK"]
os.write(1, f"apple {rank}\npear {rank}\nx,y {rank}\nAPPLE {rank}\n{'z' * 3000}apple\n".encode())
os.write(2, f"orange {rank}\npear {rank}\n".encode())
"""

PLUGIN = """
import os
from {module} import LogsDest, LogsSpecs, Std

class Flat(LogsSpecs):
    def __init__(self, log_dir=None, redirects=Std.NONE, tee=Std.NONE, local_ranks_filter=None):
        super().__init__(log_dir, redirects, tee, local_ranks_filter)

    def reify(self, envs):
        os.makedirs(self._root_log_dir, exist_ok=True)
        at = lambda name: {{rank: os.path.join(self._root_log_dir, f"{{name}}{{rank}}") for rank in envs}}
        for rank, path in at("error").items():
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = path
        tee = at("out") if self._tee == Std.ALL else {{}}
        return LogsDest(at("out"), at("err"), tee, {{}}, at("error"), os.path.join(self._root_log_dir, "filtered"), "")

    @property
    def root_log_dir(self):
        return self._root_log_dir
"""


class Side:
    """One launcher, and a folder for its logs."""

    def __init__(self, launcher: Launcher, name: str, command: list[str]) -> None:
        self._launcher = launcher
        self._command = command
        self.name = name
        self.logs = launcher.folder / f"logs-{name}"

    def run(self, script: str, *flags: str, env: dict[str, str] | None = None) -> list[str]:
        """The lines of standard output, sorted, of two workers that succeed."""
        options = ["--nproc-per-node=2", f"--log-dir={self.logs}", *flags]
        job = self._launcher.command([*self._command, *options, self._launcher.script(script)], env)
        assert job.ends() == 0, job.err
        return sorted(job.out)

    def refuses(self, script: str, *flags: str, env: dict[str, str] | None = None) -> str:
        """What it says when it does not start the workers."""
        options = [f"--log-dir={self.logs}", *flags]
        job = self._launcher.command([*self._command, *options, self._launcher.script(script)], env)
        assert (job.ends(), job.out) == (1, [])
        return job.err

    def files(self) -> dict[str, list[str]]:
        """Below the attempt's folder: path to sorted lines."""
        (attempt,) = self.logs.glob("*/attempt_0")
        return {
            str(path.relative_to(attempt)): [each.decode() for each in sorted(path.read_bytes().split(b"\n"))]
            for path in attempt.rglob("*")
            if path.is_file()
        }


class Sides(NamedTuple):
    """Both launchers, where torch's may have been recorded."""

    ours: Side
    theirs: Side
    record: Record
    test: str

    def both(self, question: object, ask: Callable[[Side], object]) -> tuple[object, object]:
        """What is asked, of ours and of theirs, as plain JSON; `question` is all that it depends on."""
        theirs = self.record.answer("devices_and_output", self.test, question, lambda: ask(self.theirs))
        return json.loads(json.dumps(ask(self.ours))), theirs

    def same(self, question: object, ask: Callable[[Side], object]) -> object:
        """What is asked, which must be the same of both."""
        ours, theirs = self.both(question, ask)
        assert ours == theirs
        return ours


@pytest.fixture
def sides(launcher: Launcher, record: Record, request: pytest.FixtureRequest) -> Sides:
    ours, theirs = Side(launcher, "ours", RALLYRUN), Side(launcher, "theirs", TORCHRUN)
    return Sides(ours, theirs, record, request.node.name)


@pytest.mark.parametrize("visible", [None, "3,1", " 7 , GPU-aa ,2"])
@pytest.mark.parametrize("flags", [[], ["--virtual-local-rank"]])
def test_local_ranks_and_devices(sides: Sides, flags: list[str], visible: str | None) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    lines = sides.same([SEEN, flags, env], lambda side: side.run(SEEN, *flags, env=env))
    assert isinstance(lines, list)
    assert len(lines) == 2


@pytest.mark.parametrize(
    "flags",
    [
        ["--tee=3", "--duplicate-stdout-filters=apple,x,,y"],
        ["--tee=3", "--duplicate-stdout-filters=apple", "--duplicate-stderr-filters=orange,none"],
        ["--tee=1", "--local-ranks-filter=1", "--duplicate-stdout-filters=apple", "--duplicate-stderr-filters="],
        ["--redirects=3", "--duplicate-stdout-filters=apple"],
        ["--tee=0:1", "--duplicate-stdout-filters=, "],
        ["--duplicate-stderr-filters=orange"],
    ],
)
def test_filtered_lines(sides: Sides, flags: list[str]) -> None:
    def ask(side: Side) -> object:
        side.run(TALK, *flags)
        return side.files()

    sides.same([TALK, flags], ask)


@pytest.mark.parametrize(
    "template", ["[${role_name}|${rank}|${local_rank}|${x}|$$|$] ", "", "$rank-${local_rank}", "é${", "${rank}\\n"]
)
def test_prefixes(sides: Sides, template: str) -> None:
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template}
    sides.same(template, lambda side: side.run("print('hello')", "--tee=3", "--role=r", env=env))


def plugin(folder: Path, module: str, name: str = "flat") -> dict[str, str]:
    """An installed package that offers log specs; returns the environment in which it is."""
    site = folder / f"site-{module}"
    (site / "flat_specs-1.dist-info").mkdir(parents=True)
    (site / "flat_specs-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: flat-specs\nVersion: 1\n")
    (site / "flat_specs-1.dist-info/entry_points.txt").write_text(f"[torchrun.logs_specs]\n{name} = flat_specs:Flat\n")
    (site / "flat_specs.py").write_text(PLUGIN.format(module=module))
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}


@pytest.mark.parametrize("tee", ["0", "3"])
def test_log_specs_of_a_third_party_with_their_import_line_changed(sides: Sides, tmp_path: Path, tee: str) -> None:
    modules = {"ours": "rallypoint.workers.logs.specs", "theirs": "torch.distributed.elastic.multiprocessing"}

    def ask(side: Side) -> object:
        env = plugin(tmp_path, modules[side.name])
        lines = side.run(
            "import os; print('out', os.environ['RANK'])",
            "--logs-specs=flat",
            f"--tee={tee}",
            "--duplicate-stdout-filters=1",
            env=env,
        )
        return lines, {path.name: path.read_bytes().decode() for path in side.logs.iterdir()}

    sides.same([PLUGIN, tee], ask)


def test_log_specs_written_for_torch_are_told_apart(launcher: Launcher, tmp_path: Path) -> None:
    env = plugin(tmp_path, "torch.distributed.elastic.multiprocessing")
    said = Side(launcher, "ours", RALLYRUN).refuses("print('ran')", "--logs-specs=flat", env=env)
    (sentence,) = re.findall("error: (.*)", said)
    assert "--logs-specs=flat" in sentence
    assert "to import LogsSpecs from Rallypoint" in sentence


def test_log_specs_that_fail_are_named(launcher: Launcher, tmp_path: Path) -> None:
    said = Side(launcher, "ours", RALLYRUN).refuses(
        "print('ran')", "--logs-specs=broken", env=plugin(tmp_path, "no_such_module", "broken")
    )
    assert re.search("error: --logs-specs=broken: .*ModuleNotFoundError.*no_such_module", said)
    assert "Traceback" not in said
