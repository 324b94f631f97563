"""Which variables go along, and which exit code comes back."""

from __future__ import annotations

import pytest

from rallypoint.base.errors import UsageError
from rallypoint.remote.inputs import file_variables, named_variables, node_variables, parse_hosts
from rallypoint.remote.job import End, exit_code, missing
from rallypoint.remote.messages import Prepare, decode_answer, decode_request, encode, portable

HERE = {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "PATH": "/bin", "NAME": "a=b"}


def test_variables_that_are_named() -> None:
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
        ("MISSING", "--env=MISSING: there is no such variable here; set it, or give its value: MISSING=VALUE"),
        ("", "'' is not a variable's name"),
        ("=x", "'' is not a variable's name"),
        ("A B=x", "'A B' is not a variable's name"),
        ("1A=x", "'1A' is not a variable's name"),
        ("A-*", "'A-*' is not a variable's name"),
        ("Ä=x", "is not a variable's name"),
    ],
)
def test_what_names_no_variable(word: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        named_variables([word], HERE)
    assert words in str(error.value)


def test_a_file_of_variables() -> None:
    data = b'# comment\n\nA=1\r\n B =two words # kept\nNAME\nMISSING\nQ="quoted"\nRAW=\xff\n'
    assert file_variables(data, "env", HERE) == {
        "A": "1",
        "B": "two words # kept",
        "NAME": "a=b",
        "Q": '"quoted"',
        "RAW": "\udcff",
    }


def test_a_file_that_is_none() -> None:
    with pytest.raises(UsageError, match="env, line 2: 'export A' is not a variable's name; write NAME=VALUE"):
        file_variables(b"A=1\nexport A=1\n", "env", HERE)


def test_a_nul_byte_in_a_file() -> None:
    with pytest.raises(UsageError, match="env, line 1: no variable can hold a NUL byte"):
        file_variables(b"A=1\0\n", "env", HERE)


def test_each_node_is_told_how_the_nodes_meet() -> None:
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


def test_any_bytes_cross() -> None:
    """Arguments, paths and variables are bytes to the kernel."""
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
        b'{"type":"Hello"}',
        b'{"type":"Hello","version":1,"address":""}',
        b'{"type":"Hello","version":"1","address":"not an address"}',
        b'{"type":"Found","address":"10.0.0.1","port":0}',
        b'{"type":"Found","address":"-oProxyCommand","port":1}',
        b'{"type":"Ended","code":256}',
        b'{"type":"Ended","code":1e9}',
        b'{"type":"Start"}',
    ],
)
def test_what_is_no_answer(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_answer(line)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([0, 3, 1], 3),
        ([1, 0], 1),
        ([-9, 0], 0),
        ([None, 0], 0),
        ([None, 1], 1),
        ([-9, 143, 1], 143),
        ([-9, None], 137),
        ([-15], 143),
        ([None, None], 1),
        ([255], 255),
    ],
)
def test_the_exit_code_of_a_launch(codes: list[int | None], expected: int) -> None:
    ends = [End(f"n{number}", code) for number, code in enumerate(codes)]
    assert exit_code(ends) == expected
    assert missing(ends) == [end.host for end in ends if end.code is None or end.code < 0]
