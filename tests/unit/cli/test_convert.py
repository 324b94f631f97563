from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rallypoint
from rallypoint.agent.launch import LaunchConfig
from rallypoint.base.errors import UserError
from rallypoint.cli.convert import (
    OURS,
    EntryPoint,
    RendezvousChoice,
    choose_rendezvous,
    config_from_options,
    limit_threads,
    warn_of_variables,
)
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.parse import parse, parse_nnodes
from rallypoint.cli.similar_names import closest_match
from rallypoint.rendezvous.backends.option_table import KNOWN
from rallypoint.rendezvous.handler import rendezvous_handler_registry
from rallypoint.rendezvous.params import RendezvousParameters


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)


def _convert(*arguments: str, **environ: str) -> tuple[LaunchConfig, EntryPoint, tuple[str, ...]]:
    return config_from_options(parse(arguments, environ), environ)


def test_devices_and_output() -> None:
    flags = ["--virtual-local-rank", "--event-log-handler=console", "--local-ranks-filter=0, 1", "--nproc-per-node=cpu"]
    config, _, _ = _convert(*flags, "s.py")
    assert (config.virtual_local_rank, config.event_log_handler) == (True, "console")
    assert config.nproc_per_node == len(os.sched_getaffinity(0))


def test_errors_name_the_variable() -> None:
    with pytest.raises(UserError, match="PET_MAX_RESTARTS=-1"):
        _convert("s.py", PET_MAX_RESTARTS="-1")
    with pytest.raises(UserError, match="PET_TEE: 'x'"):
        _convert("s.py", PET_TEE="x")


def test_the_progress_file_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _convert("--progress-file=step", "train.py")[0].features.recovery.progress_file == str(tmp_path / "step")


def test_unknown_signals_are_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config, _, _ = _convert("--signals-to-handle=SIGTERM,SIGFOO, SIGUSR1", "s.py")
    assert config.signals_to_handle == "SIGTERM,SIGFOO, SIGUSR1"
    assert [(record.levelno, "'SIGFOO'" in record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, True)
    ]


@pytest.mark.parametrize(
    ("workers", "environ", "after"),
    [
        (2, {}, {"OMP_NUM_THREADS": "1"}),
        (1, {}, {}),
        (2, {"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4"}),
        (2, {"OMP_NUM_THREADS": ""}, {"OMP_NUM_THREADS": ""}),
    ],
)
def test_threads(
    workers: int, environ: dict[str, str], after: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    changed = environ != after
    limit_threads(LaunchConfig(1, 1, workers), environ)
    assert environ == after
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * changed


@pytest.mark.parametrize("more", [[], ["--no-python"], ["--no-python", "--module"]])
def test_run_path(more: list[str]) -> None:
    from rallypoint.workers.functions.worker import run_script_path

    _, function, arguments = _convert(*more, "--run-path", "s.py", "-x", "${local_rank}")
    assert function is run_script_path
    assert arguments == ("s.py", "-x", "${local_rank}")


# Numbers of nodes and of workers


@given(st.text(max_size=8))
def test_any_text_is_an_nnodes_or_an_error(text: str) -> None:
    try:
        low, high = parse_nnodes(text)
    except UserError:
        return
    assert 1 <= low <= high


# The rendezvous: the table of contract section 1.5, row by row


def _place(*arguments: str, max_nodes: int = 1, **environ: str) -> RendezvousChoice:
    return choose_rendezvous(parse([*arguments, "s.py"], environ), max_nodes)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--node-rank=0"],
        ["--master-addr=h"],
        ["--standalone"],
        ["--standalone", "--rdzv-backend=static", "--rdzv-endpoint=h:1", "--rdzv-id=x", "--node-rank=3"],
        ["--standalone", "--master-port=5"],
    ],
)
def test_one_node(arguments: list[str]) -> None:
    place = _place(*arguments)
    assert (place.backend, place.endpoint, place.configs, place.node_rank) == ("c10d", "localhost:0", {}, None)
    assert UUID(place.run_id).version == 4
    assert _place("--standalone", max_nodes=2).endpoint == "localhost:0"
    assert _place("--master-port=7").endpoint == "127.0.0.1:7"
    assert _place("--rdzv-endpoint=h:7").backend == "static"


def test_standalone_logs_its_endpoint(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rallypoint"):
        place = _place("--standalone")
        _place()
    (record,) = caplog.records
    assert f"--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-id={place.run_id}" in record.getMessage()


@pytest.mark.parametrize(
    ("arguments", "endpoint"),
    [
        ([], "127.0.0.1:29500"),
        (["--master-port=1"], "127.0.0.1:1"),
        (["--master-port=0"], "127.0.0.1:0"),
        (["--master-addr=h"], "h:29500"),
        (["--master-addr=[::1]", "--master-port=5"], "[::1]:5"),
        (["--rdzv-endpoint=h:3", "--master-addr=x", "--master-port=5"], "h:3"),
    ],
)
def test_static(arguments: list[str], endpoint: str) -> None:
    place = _place(*arguments, "--node-rank=1", "--rdzv-id=job", "--rdzv-conf=rank=7,timeout=3", max_nodes=2)
    flag = "--rdzv-endpoint" if "--rdzv-endpoint=h:3" in arguments else "--master-addr"
    assert place == RendezvousChoice(
        "static", endpoint, "job", {"rank": 1, "timeout": "3"}, None, flag, endpoint[0] != "1"
    )


@pytest.mark.parametrize("rank", [-1, 2])
def test_static_rank_out_of_range(rank: int) -> None:
    with pytest.raises(UserError, match=f"PET_NODE_RANK={rank}"):
        _place(max_nodes=2, PET_NODE_RANK=str(rank))


@pytest.mark.parametrize(
    ("arguments", "environ", "wish"),
    [
        ([], {}, None),
        (["--node-rank=3"], {}, 3),
        (["--node-rank=0"], {}, 0),
        ([], {"PET_NODE_RANK": "2"}, 2),
    ],
)
def test_elastic(
    arguments: list[str], environ: dict[str, str], wish: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    base = ["--rdzv-backend=c10d", "--rdzv-endpoint=h", "--rdzv-id=job", "--rdzv-conf=lease=1"]
    assert _place(*base, *arguments, max_nodes=2, **environ) == RendezvousChoice(
        "c10d", "h", "job", {"lease": "1"}, wish
    )
    assert not caplog.records


def test_elastic_without_endpoint_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert _place("--rdzv-backend=c10d").endpoint == ""
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "--rdzv-endpoint" in record.getMessage()


def test_endpoints_of_other_backends() -> None:
    assert _place("--rdzv-backend=mine", "--rdzv-endpoint=a b/c?").endpoint == "a b/c?"
    files = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=File"]
    assert _place(*files, "--rdzv-endpoint=/shared folder/x").endpoint == "/shared folder/x"


# Warnings of unknown names, with the nearest name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("join_timout", "join_timeout"),
        ("JOIN_TIMEOUT", "join_timeout"),
        ("is_hots", "is_host"),
        ("last_call", "last_call_timeout"),
        ("xyz", ""),
        ("", ""),
    ],
)
def test_closest_match(name: str, nearest: str) -> None:
    assert closest_match(name, KNOWN["c10d"]) == nearest
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
def test_unknown_options(arguments: list[str], words: list[str], caplog: pytest.LogCaptureFixture) -> None:
    choose_rendezvous(parse([*arguments, "s.py"], {}), 1)
    (warning,) = warnings_in(caplog)
    assert [word for word in words if word not in warning] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rdzv-conf=timeout=3"],
        ["--rdzv-conf=timeout=3", "--master-port=1"],
        ["--standalone", "--rdzv-conf=" + ",".join(f"{name}=1" for name in sorted(KNOWN["c10d"]))],
        ["--rdzv-backend=mine", "--rdzv-endpoint=h", "--rdzv-conf=anything=1,join_timout=2"],
    ],
)
def test_known_options(arguments: list[str], caplog: pytest.LogCaptureFixture) -> None:
    choose_rendezvous(parse([*arguments, "s.py"], {}), 1)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("backend", sorted(KNOWN))
def test_the_table_lists_the_options_of_each_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()
    get = RendezvousParameters.get

    def recording(params: RendezvousParameters, key: str, default: object = None) -> object:
        used.add(key)
        return get(params, key, default)

    monkeypatch.setattr(RendezvousParameters, "get", recording)
    rendezvous_handler_registry.create_handler(RendezvousParameters(backend, "localhost:1", "job", 2, 2, rank=0))
    checked_only = KNOWN["c10d"] if backend in ("static", "etcd") else set()  # no effect
    # Read by the agent, by a host, or as a whole.
    elsewhere = {"failure_grace", "listen", "tls_cert", "tls_key", "tls_ca", "tls_peer"}
    assert KNOWN[backend] - elsewhere <= used
    assert used - checked_only <= KNOWN[backend]


def test_unknown_variables(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_variables({"PET_NNODE": "2", "PET_NUMA_BINDING": "node", "PET_XYZ": "", "HOME": "/", "NNODE": "3"})
    nnode, numa, other = warnings_in(caplog)
    assert nnode == "PET_NNODE has no effect: no flag reads it; did you mean PET_NNODES?"
    assert numa.startswith("PET_NUMA_BINDING has no effect: --numa-binding is read only from the command line")
    assert other == "PET_XYZ has no effect: no flag reads it"
    caplog.clear()
    warn_of_variables(dict.fromkeys(["RALLYPOINT_SECRETS", "RALLYPOINT_TERMINATON_GRACE"], "1"))
    assert warnings_in(caplog) == [
        "RALLYPOINT_SECRETS has no effect: nothing reads it; did you mean RALLYPOINT_SECRET?",
        "RALLYPOINT_TERMINATON_GRACE has no effect: nothing reads it; did you mean RALLYPOINT_TERMINATION_GRACE?",
    ]


def test_known_variables(caplog: pytest.LogCaptureFixture) -> None:
    kubernetes = [f"RALLYPOINT_{service}{what}" for service in ("", "CONTROL_") for what in ("SERVICE_HOST", "PORT")]
    warn_of_variables(dict.fromkeys([*OURS, *kubernetes, "RALLYPOINT_TEST_MARK"], "1"))
    warn_of_variables({flag.variable: "" for flag in FLAGS if flag.from_environment})
    assert warnings_in(caplog) == []


def test_the_table_lists_all_variables() -> None:
    files = Path(rallypoint.__file__).parent.rglob("*.py")
    named = {name for file in files for name in re.findall(r'"(RALLYPOINT_[A-Z_]+)"', file.read_text())}
    assert {f"{name}{more}" for name in named for more in ("", "_FILE")} >= OURS
    assert named <= OURS
