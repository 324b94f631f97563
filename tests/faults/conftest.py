"""Hosts for the tests of this folder. If this machine cannot have any, the tests are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import without_compiler
from tests.faults.cluster import Cluster
from tests.faults.network import Network, network, why_not
from tests.jobs.launching import RALLYRUN, Launcher, launching


@pytest.fixture(scope="session")
def hosts_possible() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(f"FAULT TESTS DID NOT RUN: {reason}")


@pytest.fixture
def net(hosts_possible: None) -> Iterator[Network]:
    with network("n1", "n2") as made:
        yield made


@pytest.fixture
def rallyrun(net: Network, tmp_path: Path) -> Iterator[Launcher]:
    # Jobs end before their hosts go.
    with launching(tmp_path) as made:
        yield made


@pytest.fixture
def cluster(hosts_possible: None, tmp_path: Path) -> Iterator[Cluster]:
    # The launcher ends its jobs first; then the hosts must be empty.
    with network() as net, launching(tmp_path) as launcher:
        made = Cluster(net, launcher)
        yield made
        made.check()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of one worker that trains alone."""
    from tests.faults.test_training import MODEL, final_loss

    folder = tmp_path_factory.mktemp("undisturbed")
    env = {
        **without_compiler.ENVIRONMENT,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with launching(folder) as launcher:
        job = launcher.command([*RALLYRUN, "--standalone", *MODEL], env)
        assert job.ends() == 0, job.err
        return final_loss("\n".join(job.out))
