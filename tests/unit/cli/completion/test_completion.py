"""What TAB completes, asked of the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rallypoint.cli.command_table import Option, read_command, read_verbs
from rallypoint.cli.completion.scripts import SHELLS, completion_script
from rallypoint.cli.completion.values import Values, values_of
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.parse import build_parser
from rallypoint.cli.rallyctl import build_parser as build_rallyctl
from rallypoint.cli.rallyctl import main
from tests.unit.cli.completion.shells import DEADLINE, OnTerminal, Shell, start

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Shell]]:
    """Starts a shell, if it does not run yet, in a folder with scripts and a host file."""
    shells: dict[str, Shell] = {}

    def shell(name: str) -> Shell:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
        if name not in shells:
            folder, home = tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("home")
            fill(folder)
            shells[name] = start(name, completion_script(name, build_parser(), build_rallyctl()), folder, home)
        return shells[name]

    yield shell
    for each in shells.values():
        each.close()


@pytest.fixture(params=sorted(SHELLS))
def shell(request: pytest.FixtureRequest, started: Callable[[str], Shell]) -> Shell:
    """Each shell."""
    return started(request.param)


def fill(folder: Path) -> None:
    for each in ("train.py", "notes.txt", "package/__init__.py", "package/trainer.py", "package/data/my script.py"):
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        (folder / each).touch()
    (folder / "hostfile").write_text("# two nodes\nquince1 slots=8\nquince2:8\nquaint@other\n\n[fd00::1]:4")
    (folder / "pair.txt").write_text("left\nright\n")


def test_flags_are_completed_and_also_as_torchrun_writes_them(shell: Shell) -> None:
    found = {each.rstrip("=") for each in shell.every("rallyrun --")}
    assert found == {flag.name for flag in FLAGS} | {"--help", "--version"}
    assert {each.rstrip("=") for each in shell.every("rallyrun --rdzv-b")} == {"--rdzv-backend"}


BACKENDS = {"c10d", "etcd", "etcd-v2", "static"}

CASES = {
    # flags
    "rallyrun --rdzv_b": {"--rdzv-backend"},
    "rallyrun --nproc-per-node=2 --stand": {"--standalone"},
    "rallyctl status --w": {"--watch"},
    "rallyctl launch --ho": {"--hosts", "--hostfile"},
    "/usr/bin/rallyrun --stand": {"--standalone"},
    # values of flags
    "rallyrun --rdzv-backend=": BACKENDS,
    "rallyrun --rdzv-backend ": BACKENDS,
    "rallyrun --rdzv_backend=et": {"etcd", "etcd-v2"},
    "rallyrun --rdzv_backend et": {"etcd", "etcd-v2"},
    "rallyrun --start-method=": {"spawn", "fork", "forkserver"},
    "rallyrun --cluster=": {"auto", "slurm", "mpi", "k8s", "none"},
    "rallyrun --preflight=": {"warn", "require"},
    "rallyrun -t ": {"0", "1", "2", "3"},
    "rallyrun --rdzv-conf=join": {"join_timeout="},
    "rallyrun --rdzv-conf=join_timeout=5,is": {"is_host="},
    "rallyrun --signals-to-handle=SIGTERM,SIGUSR": {"SIGUSR1", "SIGUSR2"},
    "rallyrun --log-dir=": {"package"},
    "rallyrun --progress-file=no": {"notes.txt"},
    "rallyrun --event-log-handler=js": {"jsonl:"},
    "rallyrun --event-log-handler=jsonl:no": {"notes.txt"},
    "rallyrun --nnodes=": set(),
    "rallyctl status --rdzv-backend=": {"c10d", "static", "etcd"},
    "rallyctl check --require=shared-memory,clo": {"clock"},
    "rallyctl launch --env RALLYPOINT_TEST_OF": {"RALLYPOINT_TEST_OF_SHELLS"},
    # hosts
    "rallyctl launch --hosts=quin": {"quince1", "quince2"},
    "rallyctl launch --hosts quince1:8,quin": {"quince1", "quince2"},
    "rallyctl launch --hosts=quai": {"quaint@other"},
    "rallyctl launch --hostfile=pa": {"pair.txt", "package"},
    "rallyctl status quin": {"quince1", "quince2"},
    # verbs, scripts and their arguments
    "rallyctl st": {"status", "stop", "stacks"},
    "rallyctl completion ": {"bash", "zsh", "fish"},
    "rallyctl report no": {"notes.txt"},
    "rallyctl report train.py no": {"notes.txt"},
    "rallyrun ": {"train.py", "package"},
    "rallyrun --standalone --nproc-per-node 2 ": {"train.py", "package"},
    "rallyrun --nproc 2 tr": {"train.py"},
    "rallyrun package/t": {"package/trainer.py"},
    "rallyrun -- tr": {"train.py"},
    "rallyrun train.py n": {"notes.txt"},
    "rallyrun train.py --st": set(),
    "rallyrun train.py --rdzv-backend ": {"train.py", "notes.txt", "package", "hostfile", "pair.txt"},
    "rallyrun -m pa": {"package"},
    "rallyrun -m package.": {"package.trainer", "package.__init__", "package.data"},
    "rallyrun --no-python rallyr": {"rallyrun"},
    "rallyrun --node-check=rallyr": {"rallyrun"},
    # a command of its own
    "rallyctl launch --hosts=a,b -- rallyr": {"rallyrun"},
    "rallyctl launch --hosts=a,b -- rallyrun --rdzv-b": {"--rdzv-backend"},
    "rallyctl launch --hosts=a,b rallyrun --standalone --rdzv-backend=": BACKENDS,
    "rallyctl launch --hosts=a,b -- rallyrun --standalone tr": {"train.py"},
    "rallyctl launch --hosts=a,b -- rallyctl st": {"status", "stop", "stacks"},
}
"""What is typed, and what completes its last word."""


def test_each_line_is_completed(shell: Shell) -> None:
    wrong = {line: found for line, wanted in CASES.items() if (found := _flags(shell.every(line))) != wanted}
    assert wrong == {}


def _flags(found: set[str]) -> set[str]:
    """As found, but flags without the sign that some shells put behind them."""
    return {each.rstrip("=") if each.startswith("-") else each for each in found}


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_tab_writes_into_the_line(started: Callable[[str], Shell], name: str) -> None:
    shell = started(name)
    assert isinstance(shell, OnTerminal)
    assert shell.tab("rallyrun --rdzv-b") == "rallyrun --rdzv-backend="
    assert shell.tab("rallyrun --rdzv-backend=st") == "rallyrun --rdzv-backend=static "
    assert shell.tab("rallyrun --standalone tra") == "rallyrun --standalone train.py "
    assert shell.tab("rallyctl launch --hosts quince1:8,quince2") == "rallyctl launch --hosts quince1:8,quince2"
    assert shell.tab("rallyrun --log-dir=pack") == "rallyrun --log-dir=package/"
    assert shell.tab("rallyrun package/data/m") == "rallyrun package/data/my\\ script.py "
    assert shell.tab("rallyrun package/data/my\\ s") == "rallyrun package/data/my\\ script.py "


def test_network_interfaces_are_completed(shell: Shell) -> None:
    if not Path("/sys/class/net/lo").exists():
        pytest.skip("this machine does not show its network interfaces in /sys")
    assert shell.every("rallyrun --socket-ifname=") >= {"auto", "lo"}
    assert shell.every("rallyrun --socket-ifname=eth7,l") >= {"lo"}


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out == completion_script("zsh", build_parser(), build_rallyctl())


def test_no_tab_starts_python(shell: Shell) -> None:
    for line in (
        "rallyctl ",
        "rallyrun --rdzv-backend=",
        "rallyctl launch --hosts=quin",
        "rallyctl launch -- rallyrun -",
    ):
        assert shell.every(line)
    assert [each.name for each in shell.home.iterdir() if each.name.startswith("started-")] == []


def test_zsh_can_also_source_the_script(started: Callable[[str], Shell]) -> None:
    script = started("zsh").home / "_rallyrun"
    program = f"autoload -Uz compinit && compinit -u -D; source {script}; print $_comps[rallyrun] $_comps[rallyctl]"
    done = subprocess.run(["zsh", "-f", "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert (done.stdout, done.stderr) == ("_rallyrun _rallyrun\n", "")


def test_each_flag_that_takes_a_value_is_in_a_table() -> None:
    unknown = Option("--colour", "", "COLOUR", "a colour", (), False)
    with pytest.raises(LookupError, match="--colour COLOUR"):
        values_of(unknown)
    assert values_of(unknown._replace(words=("red", "green"))) == Values(("red", "green"))
    commands = (read_command(build_parser(), "rallyrun"), *read_verbs(build_rallyctl(), "rallyctl"))
    assert sum(1 for command in commands for each in command.options if each.metavar and values_of(each)) > 80
