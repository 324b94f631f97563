"""Runs a case under one launcher and collects everything that it left as facts: names with slashes to plain values.

Values that cannot be the same twice get a common name: ports, process ids, times, random job ids, random ends of folder
names, and the folder of the side.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from tests.conformance.side_by_side.case import Case, Side
from tests.jobs.launching import Job, Launcher
from tests.ports import free_port

_BLOCK = re.compile(
    r"^\[\d+\]:\n  time      : (?P<time>.*)\n  host      : (?P<host>.*)\n  rank      : (?P<rank>\d+) "
    r"\(local_rank: (?P<local_rank>\d+)\)\n  exitcode  : (?P<exitcode>-?\d+) \(pid: \d+\) (?: \((?P<signal>\S+)\))?\n"
    r"  error_file: (?P<error_file>.*)\n  traceback : (?P<traceback>(?:.*\n)*?)(?=[=-]{4,}|\[\d+\]:)",
    re.MULTILINE,
)
_REPORT = re.compile(
    r"^={3,}\n(?P<title>.+ FAILED)\n-{3,}\nFailures:\n(?P<others>(?:.*\n)*?)Root Cause .*\n(?P<root>(?:.*\n)*?={3,})",
    re.MULTILINE,
)
_STOPPED = re.compile(r"^Stopped by rallyrun: ranks? (.*)$", re.MULTILINE)
_INFO = re.compile(r"^I\d{4} .*?\]   (\w+)(?: *: |=)(.*)$", re.MULTILINE)
"""At LOGLEVEL=INFO: what is launched, and what a round is like."""
_SPOKEN = re.compile(r"(^|\]:)(err \d|Traceback\? no)")
"""Lines of workers."""
_STOPPING = {"-15", "-9"}
"""How workers end that their launcher stops; torchrun calls those failures."""


def facts_of_stderr(text: str) -> dict[str, object]:
    """Everything that both say."""
    facts: dict[str, object] = {"usage": "usage:" in text}
    facts["spoken"] = sorted(line for line in text.splitlines() if _SPOKEN.search(line))
    facts |= {f"info/{name}": value for name, value in _INFO.findall(text)}
    if (report := _REPORT.search(text)) is not None:
        facts |= {f"report/{name}": fact for name, fact in _report(report).items()}
    if events := _events(text):
        facts["events"] = events
    return facts


def _report(report: re.Match[str]) -> dict[str, object]:
    root = _BLOCK.search(report["root"])
    assert root is not None, report[0]
    others = [each.groupdict() for each in _BLOCK.finditer(report["others"])]
    stopped = {int(each["rank"]) for each in others if each["exitcode"] in _STOPPING}
    if (ours := _STOPPED.search(report["others"])) is not None:
        stopped |= _ranks(ours[1])
    failed = sorted((each["rank"], each["exitcode"]) for each in others if int(each["rank"]) not in stopped)
    facts: dict[str, object] = {
        "title": report["title"],
        "stopped": sorted(stopped),
        "others": [list(each) for each in failed],
    }
    for name, fact in root.groupdict().items():
        if name != "time":
            facts[f"root/{name}"] = fact
    facts["root/traceback"] = re.sub(r"PID \d+", "PID", root["traceback"].rstrip().split("\n")[-1].strip())
    return facts


def _ranks(text: str) -> set[int]:
    found: set[int] = set()
    for part in re.split(r",| and ", text):
        low, _, high = part.strip().partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def _events(text: str) -> list[Any]:
    """Events of the console handler: state, source, rank, and whether something was raised; in no order."""
    shown = []
    for line in text.splitlines():
        if line.startswith('{"name": "torchelastic.'):
            event = json.loads(line)
            about: dict[str, Any] = event["metadata"]
            shown.append(
                [event["name"], event["source"], about["global_rank"], about["raw_error"] is not None, sorted(about)]
            )
    return sorted(shown, key=str)


Facts = dict[str, object]

_STEERING = ("CUDA_", "ZE_", "PYTHON_EXEC", "USE_LIBUV", "NCCL_")


class Running:
    """A case that runs on one side."""

    def __init__(self, launcher: Launcher, case: Case, side: Side) -> None:
        self._case = case
        self._side = side
        self._port = str(free_port())
        self._here = launcher.folder / side.value
        for name in ("found", "tmp"):
            (self._here / name).mkdir(parents=True)
        for name, text in (("script.py", case.program), *case.files):
            path = self._here / name
            path.write_text(self._filled(text))
            if text.startswith("#!"):
                path.chmod(0o755)
        self._environments = [self._environment(launcher, number) for number in range(len(case.nodes))]
        self._jobs = []
        for number, (flags, env) in enumerate(zip(case.nodes, self._environments, strict=True)):
            words = [word.replace("{node}", str(number)) for word in (*case.flag_words(), *flags, *case.words)]
            self._jobs.append(Job([*case.entry.command(side), *map(self._filled, words)], env, self._here))
        launcher.jobs += self._jobs

    def _filled(self, text: str) -> str:
        return text.replace("{port}", self._port).replace("{here}", str(self._here))

    def _environment(self, launcher: Launcher, node: int) -> dict[str, str]:
        env: dict[str, str | None] = {
            **{name: text for name, text in launcher.environment().items() if not name.startswith(_STEERING)},
            "TMPDIR": str(self._here / "tmp"),
            "FOUND": str(self._here / "found"),
            "NODE": str(node),
            "PYTHONDONTWRITEBYTECODE": "1",  # a folder that Python makes beside a module is no launcher's
            **{name: text and self._filled(text) for name, text in self._case.env},
        }
        return {name: text for name, text in env.items() if text is not None}

    def _send(self) -> None:
        """Send the case's signal, if it has one, when all workers are up."""
        if self._case.send is None:
            return
        for job in self._jobs:
            job.until(lambda lines: lines.count("up") >= self._case.ups, "all workers are up")
        for job in self._jobs:
            job.signal(self._case.send)

    def facts(self) -> Facts:
        """Send what is to be sent, wait for the end, and say what there is."""
        self._send()
        codes = [job.ends() for job in self._jobs]
        facts: Facts = {f"exit/{node}": self._code(code) for node, code in enumerate(codes)}
        for node, job in enumerate(self._jobs):
            facts[f"stdout/{node}"] = "(help)" if job.out[:1] and job.out[0].startswith("usage:") else self._lines(job)
            for name, fact in facts_of_stderr(job.err).items():
                facts[f"stderr/{node}/{name}"] = self._variable(name.removeprefix("info/"), fact)
        facts |= {f"worker/{name}": fact for name, fact in self._found().items()}
        facts |= self._files()
        return facts

    def _code(self, code: int) -> int:
        """Torchrun may crash when it has nothing left to do after a stop (the contract's section 5.6)."""
        return 1 if code == -signal.SIGABRT and self._side is Side.TORCH else code

    def errors(self) -> str:
        """What all nodes have said on standard error, for a person."""
        return "\n\n".join(job.err for job in self._jobs)

    def _lines(self, job: Job) -> list[str]:
        return sorted(_shorter(self._plain(line)) for line in job.out)

    def _found(self) -> Facts:
        facts: Facts = {}
        for path in sorted((self._here / "found").iterdir()):
            told = json.loads(path.read_text())
            given = self._environments[int(path.name[0])]
            env: dict[str, str] = told.pop("env")
            told["python"] = _interpreter(Path(told["python"]))
            facts |= {f"{path.name}/{name}": self._plain(fact) for name, fact in told.items()}
            for name in env.keys() | given.keys():
                if env.get(name) != given.get(name):
                    facts[f"{path.name}/env/{name}"] = self._variable(name, env.get(name))
        return facts

    def _variable(self, name: str, value: object) -> object:
        if name.upper() == "MASTER_PORT" and value is not None:
            return "<port>" if value == self._port else "<a free port>"
        return self._plain(value)

    def _files(self) -> Facts:
        """All files and folders but the case's own, with what is in them."""
        own = {"found", "script.py", *(name for name, _ in self._case.files)}
        facts: Facts = {}
        for path in sorted(self._here.rglob("*")):
            name = path.relative_to(self._here)
            if name.parts[0] in own or name.parts == ("tmp",):
                continue
            facts[f"file/{self._plain(str(name))}"] = self._content(path)
        return facts

    def _content(self, path: Path) -> object:
        if path.is_dir():
            return "(folder)"
        if not path.is_file():
            return "(special)"
        content = path.read_bytes()
        try:
            return _error_file(json.loads(content), self._plain)
        except ValueError:
            lines = _shorter(content.decode(errors="surrogateescape")).split("\n")
            return sorted(lines) if path.name.startswith("filtered") else lines

    def _plain(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._plain(each) for each in value]
        if isinstance(value, dict):
            return {name: self._plain(each) for name, each in value.items()}
        if not isinstance(value, str):
            return value
        text = value.replace(str(self._here), "<here>").replace(self._port, "<port>")
        for pattern, common in _COMMON:
            text = pattern.sub(common, text)
        return text


_COMMON = [
    (re.compile(pattern), common)
    for pattern, common in (
        (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<uuid>"),
        (r"(^|(?<=/))\d{6,}(?=$|_[A-Za-z0-9_.-]*[a-z0-9_]{8}(/|$))", "<number>"),
        (r"(torchelastic|rallypoint)_[a-z0-9_]{8}(?=/|$)", "<temporary>"),
        (rf"(?<=[^/])(_{re.escape(os.uname().nodename)})?_[a-z0-9_]{{8}}(?=/(attempt|rank)_|$)", "_<random>"),
    )
]


def _interpreter(path: Path) -> str:
    """The same interpreter has several names, and so may its folder have."""
    mine = Path(sys.executable).with_name("python")
    return str(mine if path.parent.samefile(mine.parent) and path.name.startswith("python") else path)


def _shorter(text: str) -> str:
    """The text with one letter and its count in place of a letter that comes very often in a row."""
    return re.sub(r"(.)\1{99,}", lambda run: f"<{len(run[0])} times {run[1]}>", text)


def _error_file(told: object, plain: Any) -> object:
    """An error file without its times and the launcher's own frames."""
    text = re.sub(r'"timestamp": "?\d+"?', '"timestamp": "<time>"', json.dumps(told))
    text = re.sub(r'"py_callstack": "Traceback .*?\\n([^\\]+)\\n"', r'"py_callstack": "... \1"', text)
    return plain(json.loads(text))
