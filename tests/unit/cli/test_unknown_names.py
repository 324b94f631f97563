"""Names that nothing reads get a warning, with the name that was likely meant."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import rallypoint
from rallypoint.cli.convert import OURS, choose_rendezvous, closest_match, warn_of_variables
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.parse import parse
from rallypoint.rendezvous.backends.option_table import KNOWN
from rallypoint.rendezvous.handler import rendezvous_handler_registry
from rallypoint.rendezvous.params import RendezvousParameters


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("join_timout", "join_timeout"),
        ("JOIN_TIMEOUT", "join_timeout"),
        ("is_hots", "is_host"),
        ("last_call", "last_call_timeout"),
        ("xyz", ""),
        ("", ""),
    ],
)
def test_the_nearest_name(name: str, meant: str) -> None:
    assert closest_match(name, KNOWN["c10d"]) == meant
    assert closest_match(name, ()) == ""


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--standalone", "--rdzv-conf=join_timout=3"], ["--rdzv-conf: the option 'join_timout'", "join_timeout?"]),
        (["--standalone", "--rdzv-conf=timeout=3"], ["'timeout' has no effect with the backend c10d", "join_timeout?"]),
        (["--rdzv-backend=etcd", "--rdzv-endpoint=h", "--rdzv-conf=prefx=/x"], ["'prefx'", " prefix?"]),
        (["--master-port=1", "--rdzv-conf=join_timeout=3"], ["with the backend static", "mean timeout?"]),
        (["--master-port=1", "--rdzv-conf=rank=3"], ["'rank'", "mean --node-rank?"]),
    ],
)
def test_an_unknown_option(arguments: list[str], words: list[str], caplog: pytest.LogCaptureFixture) -> None:
    choose_rendezvous(parse([*arguments, "s.py"], {}), 1)
    (said,) = warnings_in(caplog)
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rdzv-conf=timeout=3"],
        ["--rdzv-conf=timeout=3", "--master-port=1"],
        ["--standalone", "--rdzv-conf=" + ",".join(f"{name}=1" for name in sorted(KNOWN["c10d"]))],
        ["--rdzv-backend=mine", "--rdzv-endpoint=h", "--rdzv-conf=anything=1,join_timout=2"],
    ],
)
def test_options_that_mean_something_to_somebody(arguments: list[str], caplog: pytest.LogCaptureFixture) -> None:
    choose_rendezvous(parse([*arguments, "s.py"], {}), 1)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("backend", sorted(KNOWN))
def test_the_table_knows_what_each_backend_reads(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    get = RendezvousParameters.get

    def asking(params: RendezvousParameters, key: str, default: object = None) -> object:
        asked.add(key)
        return get(params, key, default)

    monkeypatch.setattr(RendezvousParameters, "get", asking)
    rendezvous_handler_registry.create_handler(RendezvousParameters(backend, "localhost:1", "job", 2, 2, rank=0))
    checked_only = KNOWN["c10d"] if backend in ("static", "etcd") else set()  # of no effect on these
    # For the agent, where this node hosts, and read as a whole.
    elsewhere = {"failure_grace", "listen", "tls_cert", "tls_key", "tls_ca", "tls_peer"}
    assert KNOWN[backend] - elsewhere <= asked
    assert asked - checked_only <= KNOWN[backend]


def test_unknown_variables(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_variables({"PET_NNODE": "2", "PET_NUMA_BINDING": "node", "PET_XYZ": "", "HOME": "/", "NNODE": "3"})
    nnode, numa, other = warnings_in(caplog)
    assert nnode == "PET_NNODE has no effect: no flag reads it; did you mean PET_NNODES?"
    assert numa.startswith("PET_NUMA_BINDING has no effect: --numa-binding is read from the command line only")
    assert other == "PET_XYZ has no effect: no flag reads it"


def test_a_variable_that_is_almost_one_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_variables(dict.fromkeys(["RALLYPOINT_SECRETS", "RALLYPOINT_TERMINATON_GRACE"], "1"))
    assert warnings_in(caplog) == [
        "RALLYPOINT_SECRETS has no effect: nothing reads it; did you mean RALLYPOINT_SECRET?",
        "RALLYPOINT_TERMINATON_GRACE has no effect: nothing reads it; did you mean RALLYPOINT_TERMINATION_GRACE?",
    ]


def test_variables_of_ours_and_of_others_are_fine(caplog: pytest.LogCaptureFixture) -> None:
    kubernetes = [f"RALLYPOINT_{service}{what}" for service in ("", "CONTROL_") for what in ("SERVICE_HOST", "PORT")]
    warn_of_variables(dict.fromkeys([*OURS, *kubernetes, "RALLYPOINT_TEST_MARK"], "1"))
    assert warnings_in(caplog) == []


def test_the_table_has_each_variable_that_is_read() -> None:
    files = Path(rallypoint.__file__).parent.rglob("*.py")
    named = {name for file in files for name in re.findall(r'"(RALLYPOINT_[A-Z_]+)"', file.read_text())}
    assert {f"{name}{more}" for name in named for more in ("", "_FILE")} >= OURS
    assert named <= OURS


def test_variables_of_flags_are_fine(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_variables({flag.variable: "" for flag in FLAGS if flag.from_environment})
    assert warnings_in(caplog) == []
