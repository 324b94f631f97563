"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.etcd_cluster import EtcdCluster

# `nohup` and a shell's script ignore these for what they start, and processes hand that down.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)

# Speed is never tested: these machines are small, shared and noisy.
settings.register_profile("rallypoint", deadline=None)
settings.load_profile("rallypoint")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-transcripts", action="store_true", help="write what the transcripts play to; review the difference"
    )


@pytest.fixture(scope="session")
def _etcd_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


@pytest.fixture(name="etcd")
def _etcd(_etcd_of_session: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three members of etcd, the same for all tests, with what others left in it; members may be killed and paused."""
    yield _etcd_of_session
    _etcd_of_session.mend()
