"""Options, hooks and fixtures of all tests."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

from tests import effort, needs, outcomes, runs
from tests.environment import JOBS
from tests.etcd_cluster import EtcdCluster

# `nohup` and shell scripts start their children with these signals ignored, and children inherit that.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)

# Users do not set it. With it, every process that we start would write at once, with nothing left to flush at exit.
os.environ.pop("PYTHONUNBUFFERED", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-transcripts", action="store_true", help="rewrite the transcripts; review the difference"
    )
    parser.addoption(
        "--rewrite-sentences", action="store_true", help="rewrite tests/sentences.txt; review the difference"
    )
    parser.addoption(
        "--torch",
        choices=["recorded", "daily", "live", "write"],
        help="questions to ask real torch: none, today's tenth (as with --fresh), all, or all to record the answers",
    )
    parser.addoption(
        "--fresh", action="store_true", help="draw new examples and seeds (make test-all) instead of the commit's"
    )
    parser.addoption("--quick", action="store_true", help="try fewer examples of each law (tests/effort.py)")
    parser.addoption(
        "--outcomes", default=outcomes.FILE, help="the file to record how each test ended (tests/outcomes.py)"
    )
    parser.addoption("--records", help="the folder with torch's recorded answers; default tests/conformance/records")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[JOBS] = tempfile.mkdtemp(prefix="rallypoint-tests-")
    # `caplog` listens at the root logger and at loggers that do not propagate. Ours stops propagating once `base.log`
    # sets it up. If we stop it here, each record comes once, whichever test sets the logger up.
    logging.getLogger("rallypoint").propagate = False
    effort.choose(quick=config.getoption("quick"), fresh=config.getoption("fresh"))
    config.addinivalue_line("markers", f"{runs.MARKER}: only `make test-all` runs it (tests/runs.py)")
    for name, meaning in needs.MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if not hasattr(config, "workerinput"):  # each process of xdist reports to this one
        path = config.rootpath / config.getoption("outcomes")
        config.pluginmanager.register(outcomes.Outcomes(path, frozenset(needs.MARKERS)))


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ.pop(JOBS), ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in needs.of(item):
            item.add_marker(name)
    runs.mark(items)


_watch = needs.Watch()


def pytest_runtest_logstart() -> None:
    _watch.taken()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield
    _check_needs(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    _check_needs(item)


def _check_needs(item: pytest.Item) -> None:
    missing = [name for name in sorted(_watch.taken()) if item.get_closest_marker(name) is None]
    assert not missing, f"the test needs the markers {missing}, for what it started or imported (see tests/needs.py)"


@pytest.fixture(scope="session")
def _etcd_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"), arguments=["--enable-v2"])
    yield cluster
    cluster.close()


@pytest.fixture(name="etcd")
def _etcd(_etcd_of_session: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three members of etcd, shared by all tests and with their keys. A test may kill and pause members.

    They also serve the v2 API.
    """
    yield _etcd_of_session
    _etcd_of_session.mend()
