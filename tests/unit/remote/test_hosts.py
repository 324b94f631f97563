"""Hosts as users write them: what they mean, and the sentence for what is none."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import UsageError
from rallypoint.remote.inputs import MOST_HOSTS, Host, labels, parse_hostfile, parse_hosts

FILE = b"""# a cluster
worker-0 slots=8        # DeepSpeed's
worker-1 slots=4

me@worker-2:2
[fd00::1]:3
fd00::2 slots=5
10.0.0.7
"""


def test_each_form_of_a_line_in_a_host_file() -> None:
    assert parse_hostfile(FILE, "hosts") == [
        Host("worker-0", 8),
        Host("worker-1", 4),
        Host("worker-2", 2, "me"),
        Host("fd00::1", 3),
        Host("fd00::2", 5),
        Host("10.0.0.7"),
    ]


def test_a_list_of_hosts() -> None:
    assert parse_hosts("a, b:8,u.v@c,[fd00::1]:2,[fd00::2],fd00::3") == [
        Host("a"),
        Host("b", 8),
        Host("c", user="u.v"),
        Host("fd00::1", 2),
        Host("fd00::2"),
        Host("fd00::3"),
    ]


def test_hosts_in_brackets() -> None:
    assert parse_hosts("n[08-10,3]:2,me@m[1-2],[fd00::1]") == [
        *(Host(name, 2) for name in ("n08", "n09", "n10", "n3")),
        *(Host(name, user="me") for name in ("m1", "m2")),
        Host("fd00::1"),
    ]
    assert parse_hostfile(b"n[1-2] slots=4\n", "hosts") == [Host("n1", 4), Host("n2", 4)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("n[1-", "is not a list of hosts: a bracket is not closed; write node[1-8]:4"),
        ("n[1-99999]", "is not a list of hosts: it expands to more than 65536 hosts"),
        ("n[1-2],n1", "the host n1 is named twice"),
        ("a,,b", "'' is not a host's name"),
        ("-oProxyCommand=x", "not a host's name"),
        ("a b", "not a host's name"),
        ("a,a", "the host a is named twice"),
        ("a:8,a:4", "the host a is named twice"),
        ("a:0", "'0' is not a number of slots; give a number from 1 to 1024"),
        ("a:", "'' is not a number of slots"),
        ("a:x", "'x' is not a number of slots"),
        ("a:2222", "ssh's port goes into ~/.ssh/config"),
        ("[a]:22", "not an IPv6 address in brackets"),
        ("[fd00::1", "not an IPv6 address in brackets"),
        ("[fd00::1]8", "not an IPv6 address in brackets"),
        ("a:b:c", "'a:b:c' is not a host; write it as node1:8, or [fd00::1]:8"),
        ("x y@a", "'x y' is not a user's name"),
        ("-l@a", "'-l' is not a user's name"),
        ("@a", "'' is not a user's name"),
        ("a" * 300, "not a host's name"),
        ("a\x1b[2J", "is not a list of hosts"),
    ],
)
def test_what_is_no_list_of_hosts(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_hosts(text)
    assert words in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "hosts names no host; write one on each line: node1 slots=8"),
        (b"# nothing\n\n", "hosts names no host"),
        (b"a slots=8\nb slot=8\n", "hosts, line 2: 'slot=8' is not understood"),
        (b"a 8\n", "hosts, line 1: '8' is not understood"),
        (b"a slots=\n", "hosts, line 1: '' is not a number of slots"),
        (b"a slots=-1\n", "'-1' is not a number of slots"),
        (b"a slots=1 slots=2\n", "a is given its slots twice"),
        (b"a:8 slots=2\n", "a is given its slots twice"),
        (b"a slots=8 max_slots=8\n", "'max_slots=8' is not understood"),
        (b"a\n\nb\na\n", "the host a is named twice"),
        (b"\xff\xfe", "hosts is not text"),
        (b"".join(b"h%d\n" % number for number in range(MOST_HOSTS + 1)), "more than 16384 hosts"),
    ],
)
def test_what_is_no_host_file(data: bytes, words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_hostfile(data, "hosts")
    assert words in str(error.value)


@given(st.lists(st.tuples(st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True), st.integers(1, 1024)), min_size=1))
def test_a_file_and_a_list_mean_the_same(pairs: list[tuple[str, int]]) -> None:
    pairs = list(dict(pairs).items())
    listed = parse_hosts(",".join(f"{name}:{slots}" for name, slots in pairs))
    assert listed == parse_hostfile("".join(f"{name} slots={slots}\n" for name, slots in pairs).encode(), "hosts")
    assert [host.slots for host in listed] == [slots for _, slots in pairs]


@given(st.text())
def test_any_text_is_hosts_or_one_sentence(text: str) -> None:
    with suppress(UsageError):
        assert not any(host.target.startswith("-") for host in parse_hosts(text))


def test_hosts_of_one_name_are_told_apart() -> None:
    assert list(labels(parse_hosts("a,u@a,u@b"))) == ["a", "u@a", "b"]
