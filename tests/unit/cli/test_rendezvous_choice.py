"""The table of contract section 1.5, row by row."""

from __future__ import annotations

import logging
from uuid import UUID

import pytest

from rallypoint.base.errors import UserError
from rallypoint.cli.parse import parse
from rallypoint.cli.rendezvous_choice import RendezvousChoice, choose_rendezvous


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
def test_alone(arguments: list[str]) -> None:
    place = _place(*arguments)
    assert (place.backend, place.endpoint, place.configs, place.node_rank) == ("c10d", "localhost:0", {}, None)
    assert UUID(place.run_id).version == 4


def test_standalone_for_two_nodes_stays_standalone() -> None:
    assert _place("--standalone", max_nodes=2).endpoint == "localhost:0"


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


def test_static_on_one_node_when_a_port_is_named() -> None:
    assert _place("--master-port=7").endpoint == "127.0.0.1:7"
    assert _place("--rdzv-endpoint=h:7").backend == "static"


@pytest.mark.parametrize("rank", [-1, 2])
def test_static_rank_must_be_one_of_the_nodes(rank: int) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rdzv-backend=c10d", "--rdzv-endpoint=h:99999"], "--rdzv-endpoint: .*'99999'"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=h:x"], "--rdzv-endpoint: .*'x'"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=a b:1"], "--rdzv-endpoint: .*'a b'"),
        (["--rdzv-endpoint=h"], "--rdzv-endpoint: .*no port"),
        (["--master-addr=a/b", "--master-port=1"], "--master-addr and --master-port: .*'a/b'"),
        (["--master-port=99999"], "--master-addr and --master-port: .*'99999'"),
        (["--rdzv-conf=foo"], "--rdzv-conf: .*'foo'"),
    ],
)
def test_bad_places(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        _place(*arguments)


@pytest.mark.parametrize("key", ["backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr"])
def test_reserved_options(key: str) -> None:
    with pytest.raises(UserError, match=f"PET_RDZV_CONF has the key '{key}'"):
        _place("--standalone", PET_RDZV_CONF=f"a=1,{key}=2")


def test_endpoints_of_other_backends_have_their_own_form() -> None:
    assert _place("--rdzv-backend=mine", "--rdzv-endpoint=a b/c?").endpoint == "a b/c?"
    files = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=File"]
    assert _place(*files, "--rdzv-endpoint=/shared folder/x").endpoint == "/shared folder/x"
