"""An emulated machine with an aarch64 processor: Debian's Python under qemu, in namespaces of its own.

Laws:
1. Nothing on this machine changes: packages are unpacked into `build/aarch64`, apt has its own folders there, and the
   kernel knows the emulator only in a user namespace.
2. Every download is checked: by apt's signatures and by the hashes of requirements/aarch64.txt.
3. If the machine cannot be set up, `UnavailableError` says why.

Emulation shows the instructions, the layout of data and the calls of the C library and the kernel that qemu translates.
The kernel is this machine's: no filter of system calls can be set, /proc shows qemu, memory is ordered as here, pages
have 4 KiB, and everything is slow.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from tests.packaging.__main__ import tracked
from tests.packaging.interpreters import ROOT

FOLDER = ROOT / "build" / "aarch64"
ENTER = Path(__file__).with_name("enter.sh")
REQUIREMENTS = ROOT / "requirements" / "aarch64.txt"
PYTHON = "python3.11"
QEMU = "qemu-user"
"""From Debian 13: that of Debian 12 refuses to make a process the reaper of those below it (prctl)."""
PACKAGES = (
    *(PYTHON, "python3-pip-whl", "bash", "dash", "coreutils", "findutils", "grep", "sed", "util-linux"),
    *("base-files", "base-passwd", "netbase", "hostname", "procps", "libc-bin", "linux-libc-dev"),
)
"""Debian's: Python, what tests call, and what a machine has."""
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_SOURCES = f"""
deb [arch=arm64 signed-by={_KEYS}] http://deb.debian.org/debian bookworm main
deb [arch={{here}} signed-by={_KEYS}] http://deb.debian.org/debian trixie main
"""
_APT = """
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; "{here}"; }};
APT::Default-Release "bookworm";
APT::Sandbox::User "root";
Dir::State "{folder}/state";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "-";
"""
_TAGS = tuple(f"--platform=manylinux{each}_aarch64" for each in ("2014", "_2_17", "_2_26", "_2_28"))
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
_SET_UP = 1800.0
"""Seconds for any step of setting it up."""


class UnavailableError(Exception):
    """There is no such machine here; the text says why."""


class Machine:
    """The emulated machine, as `set_up` has made it: `/env` is a virtual environment, `/work` a copy of this tree."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self._qemu = folder / "qemu" / "usr" / "bin" / "qemu-aarch64"

    def run(self, *words: str, timeout: float = _SET_UP) -> subprocess.CompletedProcess[str]:
        """Run a command on it, in `/work`; with its end, and after `timeout` seconds, all that it has started ends."""
        namespaces = ("--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")
        inside = ("env", "--chdir=/work", *words)
        command = ["unshare", *namespaces, str(ENTER), str(self.root), str(self._qemu), *inside]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)

    def install(self, wheel: Path) -> None:
        """Install a wheel of ours in its environment, by its own pip, in place of another.

        With bytecode: where an agent has to compile what it imports, a command gives up before it answers.
        """
        (self.root / "wheels").mkdir(exist_ok=True)
        shutil.copy(wheel, self.root / "wheels")
        (pip,) = (self.root / "usr/share/python-wheels").glob("pip-*.whl")
        words = ("install", "--no-index", "--no-deps", "--force-reinstall", f"/wheels/{wheel.name}")
        done = self.run("python", f"/usr/share/python-wheels/{pip.name}/pip", *words)
        assert done.returncode == 0, done.stdout + done.stderr

    def copy_tree(self) -> None:
        """Copy this tree to `/work`, as git has it and as it was changed since."""
        names = tracked("--cached", "--others", "--exclude-standard")
        if names is None:
            raise UnavailableError("the tests are copied to the emulated machine from a checkout, and this is none")
        shutil.rmtree(self.root / "work", ignore_errors=True)
        for name in names:
            if (ROOT / name).is_file():
                (self.root / "work" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.root / "work" / name)


def set_up() -> Machine:
    """Set it up, or find it as it was left. Raises UnavailableError."""
    if platform.machine() == "aarch64":
        raise UnavailableError("this machine is an aarch64 one: all other tests have shown it")
    for program in ("apt-get", "dpkg", "unshare"):
        if shutil.which(program) is None:
            raise UnavailableError(f"the emulated machine is set up by {program}, which is not here")
    if not _KEYS.exists():
        raise UnavailableError(f"the emulated machine is made of Debian's packages, and {_KEYS} is not here")
    made_of = hashlib.sha256(REQUIREMENTS.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    ready, machine = FOLDER / "ready", Machine(FOLDER)
    if not ready.exists() or ready.read_text() != made_of:
        shutil.rmtree(FOLDER, ignore_errors=True)
        _unpack(machine.root)
        _may_run(machine)
        _make_environment(machine)
        ready.write_text(made_of)
    _may_run(machine)
    machine.copy_tree()
    return machine


def _unpack(root: Path) -> None:
    """The packages and what they depend on, without their scripts; qemu for this machine, beside them."""
    apt = FOLDER / "apt"
    for folder in (apt / "state/lists/partial", apt / "cache/archives/partial", root):
        folder.mkdir(parents=True)
    (apt / "status").touch()
    here = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()
    (apt / "sources.list").write_text(_SOURCES.format(here=here))
    (apt / "apt.conf").write_text(_APT.format(folder=apt, here=here))
    _fetch(apt, "apt-get", "update", "-qq")
    _fetch(apt, "apt-get", "install", "-qq", "-y", "--no-install-recommends", "--download-only", *PACKAGES)
    _fetch(apt, "apt-get", "download", "-qq", f"{QEMU}:{here}")
    for package in (apt / "cache/archives").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    (package,) = apt.glob("*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(root.parent / "qemu")], check=True)
    shutil.rmtree(apt)
    shutil.copy("/etc/hosts", root / "etc" / "hosts")
    # What the script of `ca-certificates` does; pip reads the file even where it fetches nothing.
    trusted = sorted((root / "usr/share/ca-certificates/mozilla").glob("*.crt"))
    (root / "etc/ssl/certs/ca-certificates.crt").write_text("".join(each.read_text() for each in trusted))
    for name in ("proc", "dev", "sys", "tmp", "work", "root"):
        (root / name).mkdir(exist_ok=True)


def _fetch(apt: Path, *command: str) -> None:
    done = subprocess.run(
        ["env", f"APT_CONFIG={apt}/apt.conf", *command],
        cwd=apt,
        capture_output=True,
        text=True,
        timeout=_SET_UP,
        check=False,
    )
    if done.returncode:
        raise UnavailableError(f"Debian's packages cannot be had: {(done.stderr or done.stdout).strip()[-300:]}")


def _may_run(machine: Machine) -> None:
    done = machine.run("true")
    if done.returncode:
        raise UnavailableError(
            "the kernel runs no programs for another machine in a user namespace, as Linux 6.7 and newer do where "
            f"they may: {done.stderr.strip()[-300:]}"
        )


def _make_environment(machine: Machine) -> None:
    done = machine.run(f"/usr/bin/{PYTHON}", "-m", "venv", "--without-pip", "/env")
    assert done.returncode == 0, done.stderr
    site = machine.root / "env/lib" / PYTHON / "site-packages"
    words = (*_TAGS, "--python-version=3.11", "--only-binary=:all:", f"--target={site}")
    command = [*_PIP, *words, "--require-hashes", "-r", str(REQUIREMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SET_UP, check=False)
    if done.returncode:
        raise UnavailableError(f"packages for aarch64 cannot be had: {done.stderr.strip()[-300:]}")
    for program in site.glob("bin/*"):  # py-spy; the others are scripts of this machine's Python
        if program.read_bytes()[:4] == b"\x7fELF":
            shutil.copy(program, machine.root / "env/bin")
