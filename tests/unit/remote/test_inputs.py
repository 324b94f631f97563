"""Hosts and variables as users write them, messages to hosts, and exit codes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import UsageError
from rallypoint.clusters.remote.inputs import (
    MOST_HOSTS,
    Host,
    file_variables,
    labels,
    named_variables,
    node_variables,
    parse_hostfile,
    parse_hosts,
)
from rallypoint.clusters.remote.job import HostExit, exit_code, missing
from rallypoint.clusters.remote.messages import Prepare, decode_answer, decode_request, encode, portable

FILE = b"""# a cluster
worker-0 slots=8        # DeepSpeed's
worker-1 slots=4

me@worker-2:2
[fd00::1]:3
fd00::2 slots=5
10.0.0.7
"""


def test_parse_hostfile() -> None:
    assert parse_hostfile(FILE, "hosts") == [
        Host("worker-0", 8),
        Host("worker-1", 4),
        Host("worker-2", 2, "me"),
        Host("fd00::1", 3),
        Host("fd00::2", 5),
        Host("10.0.0.7"),
    ]


def test_parse_hosts() -> None:
    assert parse_hosts("a, b:8,u.v@c,[fd00::1]:2,[fd00::2],fd00::3") == [
        *(Host("a"), Host("b", 8), Host("c", user="u.v"), Host("fd00::1", 2), Host("fd00::2"), Host("fd00::3"))
    ]
    assert parse_hosts("n[08-10,3]:2,me@m[1-2],[fd00::1]") == [
        *(Host(name, 2) for name in ("n08", "n09", "n10", "n3")),
        *(Host(name, user="me") for name in ("m1", "m2")),
        Host("fd00::1"),
    ]
    assert parse_hostfile(b"n[1-2] slots=4\n", "hosts") == [Host("n1", 4), Host("n2", 4)]
    assert list(labels(parse_hosts("a,u@a,u@b"))) == ["a", "u@a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "does not list any hosts"),
        ("n[1-", "is not a valid list of hosts: a bracket is not closed; write node[1-8]:4"),
        ("n[1-99999]", "is not a valid list of hosts: it expands to more than 65536 hosts"),
        ("n[1-2],n1", "the host n1 is listed twice"),
        ("a,,b", "'' is not a valid host name"),
        ("-oProxyCommand=x", "not a valid host name"),
        ("a b", "not a valid host name"),
        ("a,a", "the host a is listed twice"),
        ("a:8,a:4", "the host a is listed twice"),
        ("a:0", "'0' is not a number of slots; use 1 to 1024"),
        ("a:", "'' is not a number of slots"),
        ("a:x", "'x' is not a number of slots"),
        ("a:2222", "ssh's port goes into ~/.ssh/config"),
        ("[a]:22", "not an IPv6 address in brackets"),
        ("[fd00::1", "not an IPv6 address in brackets"),
        ("[fd00::1]8", "not an IPv6 address in brackets"),
        ("a:b:c", "'a:b:c' is not a valid host; write it as node1:8, or [fd00::1]:8"),
        ("x y@a", "'x y' is not a valid user name"),
        ("-l@a", "'-l' is not a valid user name"),
        ("@a", "'' is not a valid user name"),
        ("a" * 300, "not a valid host name"),
        ("a\x1b[2J", "is not a valid list of hosts"),
    ],
)
def test_invalid_hosts(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_hosts(text)
    assert words in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "hosts does not list any hosts; write one per line, such as node1 slots=8"),
        (b"# nothing\n\n", "hosts does not list any hosts"),
        (b"a slots=8\nb slot=8\n", "hosts, line 2: 'slot=8' is not slots=N"),
        (b"a 8\n", "hosts, line 1: '8' is not slots=N"),
        (b"a slots=\n", "hosts, line 1: '' is not a number of slots"),
        (b"a slots=-1\n", "'-1' is not a number of slots"),
        (b"a slots=1 slots=2\n", "the slots of a are set twice"),
        (b"a:8 slots=2\n", "the slots of a are set twice"),
        (b"a slots=8 max_slots=8\n", "'max_slots=8' is not slots=N"),
        (b"a\n\nb\na\n", "the host a is listed twice"),
        (b"\xff\xfe", "hosts is not text"),
        (b"".join(b"h%d\n" % number for number in range(MOST_HOSTS + 1)), "more than 16384 hosts"),
    ],
)
def test_invalid_hostfiles(data: bytes, words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_hostfile(data, "hosts")
    assert words in str(error.value)


@given(st.lists(st.tuples(st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True), st.integers(1, 1024)), min_size=1))
def test_files_and_lists_are_equivalent(pairs: list[tuple[str, int]]) -> None:
    pairs = list(dict(pairs).items())
    listed = parse_hosts(",".join(f"{name}:{slots}" for name, slots in pairs))
    assert listed == parse_hostfile("".join(f"{name} slots={slots}\n" for name, slots in pairs).encode(), "hosts")
    assert [host.slots for host in listed] == [slots for _, slots in pairs]


HERE = {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "PATH": "/bin", "NAME": "a=b"}


def test_named_variables() -> None:
    assert named_variables(["NAME", "NEW=x=y", "EMPTY=", "NCCL_*"], HERE) == {
        "NAME": "a=b",
        "NEW": "x=y",
        "EMPTY": "",
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_HCA": "mlx5",
    }
    assert named_variables(["NOBODY_*"], HERE) == {}


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("MISSING", "--env=MISSING: this variable is not set here; set it, or write its value as MISSING=VALUE"),
        ("", "'' is not a valid variable name"),
        ("=x", "'' is not a valid variable name"),
        ("A B=x", "'A B' is not a valid variable name"),
        ("1A=x", "'1A' is not a valid variable name"),
        ("A-*", "'A-*' is not a valid variable name"),
        ("Ä=x", "is not a valid variable name"),
    ],
)
def test_invalid_variables(word: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        named_variables([word], HERE)
    assert words in str(error.value)


def test_file_variables() -> None:
    data = b'# comment\n\nA=1\r\n B =two words # kept\nNAME\nMISSING\nQ="quoted"\nRAW=\xff\n'
    expected = {"A": "1", "B": "two words # kept", "NAME": "a=b", "Q": '"quoted"', "RAW": "\udcff"}
    assert file_variables(data, "env", HERE) == expected
    with pytest.raises(UsageError, match="env, line 2: 'export A' is not a valid variable name; write NAME=VALUE"):
        file_variables(b"A=1\nexport A=1\n", "env", HERE)
    with pytest.raises(UsageError, match="env, line 1: a variable cannot contain a NUL byte"):
        file_variables(b"A=1\0\n", "env", HERE)


def test_node_variables() -> None:
    hosts = parse_hosts("a,b:4")
    common = {
        "PET_NNODES": "2",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "10.0.0.1:23456",
        "PET_RDZV_ID": "ssh-1",
    }
    first, second = (node_variables(hosts, rank, "10.0.0.1:23456", "ssh-1") for rank in (0, 1))
    assert first == {**common, "PET_NODE_RANK": "0"}
    assert second == {**common, "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4"}


def test_messages_with_any_bytes() -> None:
    """Arguments, paths and variables are bytes for the kernel."""
    text = bytes(range(1, 256)).decode("utf-8", "surrogateescape")
    sent = Prepare([portable(text)], portable("/ä"), {portable("N"): portable(text)}, 30, 60, "n")
    line = encode(sent)
    assert b"\n" not in line
    got = decode_request(line)
    assert got == sent
    assert isinstance(got, Prepare)
    assert got.command[0].encode("latin-1") == bytes(range(1, 256))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b'{"type":"SupervisorHello"}',
        b'{"type":"SupervisorHello","version":1,"address":""}',
        b'{"type":"SupervisorHello","version":"1","address":"not an address"}',
        b'{"type":"EndpointFound","address":"10.0.0.1","port":0}',
        b'{"type":"EndpointFound","address":"-oProxyCommand","port":1}',
        b'{"type":"Ended","code":256}',
        b'{"type":"Ended","code":1e9}',
        b'{"type":"Start"}',
    ],
)
def test_invalid_answers(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_answer(line)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        *(([0, 0], 0), ([0, 3, 1], 3), ([1, 0], 1), ([-9, 0], 0), ([None, 0], 0), ([None, 1], 1)),
        *(([-9, 143, 1], 143), ([-9, None], 137), ([-15], 143), ([None, None], 1), ([255], 255)),
    ],
)
def test_exit_codes(codes: list[int | None], expected: int) -> None:
    ends = [HostExit(f"n{number}", code) for number, code in enumerate(codes)]
    assert exit_code(ends) == expected
    assert missing(ends) == [end.host for end in ends if end.code is None or end.code < 0]
