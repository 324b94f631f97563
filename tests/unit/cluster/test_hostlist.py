"""Lists of hosts; tests/slurm compares them with Slurm's expansion."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.clusters.hostlist import MAX_HOSTS, HostlistError, expand
from tests.effort import examples

GOOD = {
    "": "",
    "n1": "n1",
    "n[1-3,5]": "n1 n2 n3 n5",
    "n[01-03],m7": "n01 n02 n03 m7",
    "n[9-11]": "n9 n10 n11",
    "n[09-11]": "n09 n10 n11",
    "n[1-010]": "n1 n2 n3 n4 n5 n6 n7 n8 n9 n10",
    "n[001-2]": "n001 n002",
    "n05": "n05",
    "[1-3]": "1 2 3",
    "5": "5",
    "n[1-2],[3-4]": "n1 n2 3 4",
    "r[1-2]n[0-2]": "r1n0 r1n1 r1n2 r2n0 r2n1 r2n2",
    "n[1-2]5[3-4]": "n153 n154 n253 n254",
    "n[1-2]m[1-2]k[1-2]": "n1m1k1 n1m1k2 n2m1k1 n2m1k2 n1m2k1 n1m2k2 n2m2k1 n2m2k2",
    "a,b,,c": "a b c",
    ",a,": "a",
    " a, b\tc\n": "a b c",
    "a,a,n[1,1]": "a a n1 n1",
    "n[00000000000000000001-00000000000000000002]": "n00000000000000000001 n00000000000000000002",
    "n{1-2}": "n{1-2}",
}
"""Lists, and Slurm 22.05's expansion."""
BAD_FOR_BOTH = (
    *("n[3-1]", "n[]", "n[-3]", "n[a-c]", "n[1,a]", "n[1-3]]", "n[[1-2]]", "n[0x1-0x3]", "n[1--2]", "n[1-2-3]"),
    *("n[1-2,]", "n[,1]", "n[1/2]", "n[1-10/2]", "n[1-9/3,20]", "n[1-70000]"),
)
SUFFIXED = {"r[1-2]n[0-1]-ib": "r1n0-ib r1n1-ib r2n0-ib r2n1-ib", "n[1-2].x.y,m": "n1.x.y n2.x.y m"}


@pytest.mark.parametrize("text", [*GOOD, *SUFFIXED])
def test_expand(text: str) -> None:
    assert expand(text) == {**GOOD, **SUFFIXED}[text].split()
    assert len(expand(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


@pytest.mark.parametrize("text", [*BAD_FOR_BOTH, "n[1-2", "n1-2]", "n]1[", "n[1-]", "n[ 1-2]", "n[\u0661-\u0662]"])
def test_invalid_lists(text: str) -> None:
    with pytest.raises(HostlistError):
        expand(text)


@pytest.mark.parametrize(
    "text",
    [
        *("n[0-65536]", "n[0-99999999999999999999]", "n[1-300]m[1-300]", "n[1-65536],m", "a" + "[0-9]" * 15),
        *("[0]" * 17, "n[1-60000],n[1-60000]", "n" * 200_000, "[" * 100_000, "[1]" * 40_000),
        "n[" + "1," * 60_000 + "1]x[1-60000]",
    ],
)
def test_long_lists(text: str) -> None:
    with pytest.raises(HostlistError):
        expand(text)


@settings(max_examples=examples(300))
@given(st.text(alphabet="n1[]-,0 9/x", max_size=40))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    try:
        hosts = expand(text)
    except HostlistError:
        return
    assert all(hosts)
    assert len(hosts) <= MAX_HOSTS
    assert all(not set(host) & set("[], ") for host in hosts)


@settings(max_examples=examples(200))
@given(st.lists(st.from_regex(r"[a-z]{1,5}[0-9]{0,3}", fullmatch=True), max_size=30))
def test_plain_names(names: list[str]) -> None:
    assert expand(",".join(names)) == names
