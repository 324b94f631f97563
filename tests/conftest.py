"""What all tests share."""

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

# `nohup` and a shell's script ignore these for what they start, and processes hand that down.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)

# Users do not have it: with it, all that we start writes at once, and nothing is left to be flushed at exit.
os.environ.pop("PYTHONUNBUFFERED", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-transcripts", action="store_true", help="write what the transcripts play to; review the difference"
    )
    parser.addoption(
        "--rewrite-sentences", action="store_true", help="write tests/sentences.txt anew; review the difference"
    )
    parser.addoption(
        "--torch",
        choices=["recorded", "daily", "live", "write"],
        help="what real torch is asked: nothing, the day's tenth of it (as by --fresh), all, or all to write it",
    )
    parser.addoption(
        "--fresh", action="store_true", help="draw new examples and seeds (make test-all), not the commit's"
    )
    parser.addoption("--quick", action="store_true", help="try a part of the examples of each law (tests/effort.py)")
    parser.addoption(
        "--outcomes", default=outcomes.FILE, help="the file that says how each test ended (tests/outcomes.py)"
    )
    parser.addoption("--records", help="the folder of the record, if not tests/conformance/records")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[JOBS] = tempfile.mkdtemp(prefix="rallypoint-tests-")
    # `caplog` listens at the root and at loggers that do not propagate. Ours does not once it is set up (`base.log`):
    # that it is so from the start has each record come once, whatever test has set it up before.
    logging.getLogger("rallypoint").propagate = False
    effort.choose(quick=config.getoption("quick"), fresh=config.getoption("fresh"))
    config.addinivalue_line("markers", f"{runs.MARKER}: left to `make test-all` (tests/runs.py)")
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
    assert not missing, f"needs the markers {missing}, for what it has started or imported (see tests/needs.py)"


@pytest.fixture(scope="session")
def _etcd_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"), arguments=["--enable-v2"])
    yield cluster
    cluster.close()


@pytest.fixture(name="etcd")
def _etcd(_etcd_of_session: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three members of etcd, the same for all tests, with what others left in it; members may be killed and paused.

    They serve the v2 API too.
    """
    yield _etcd_of_session
    _etcd_of_session.mend()
