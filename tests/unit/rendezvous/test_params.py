from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import UserError
from rallypoint.rendezvous.params import RendezvousParameters, parse_rdzv_conf

_SIDE = st.text(alphabet="abc09 -_./:", min_size=1).map(str.strip).filter(bool)


def _params(**config: Any) -> RendezvousParameters:
    return RendezvousParameters("c10d", "h:1", "job", 1, 2, **config)


@given(st.lists(st.tuples(_SIDE, _SIDE | st.just("b=c")), min_size=1), st.sampled_from(["", " ", "\t "]))
def test_conf_is_parsed_as_written(pairs: list[tuple[str, str]], blank: str) -> None:
    text = ",".join(f"{blank}{key}{blank}={blank}{value}{blank}" for key, value in pairs)
    assert parse_rdzv_conf(text) == dict(pairs)


@pytest.mark.parametrize(
    ("text", "named"),
    [("foo", "'foo'"), ("a=", "'a'"), ("=x", "'=x'"), ("a=1,", "''"), (",", "','"), ("a=1,=2", "'=2'")],
)
def test_conf_without_key_or_value_is_refused(text: str, named: str) -> None:
    with pytest.raises(UserError, match="write") as caught:
        parse_rdzv_conf(text)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "low", "high"), [("", 1, 1), ("c10d", 0, 1), ("c10d", -1, 1), ("c10d", 2, 1), ("c10d", 1, 0)]
)
def test_impossible_parameters_are_refused(backend: str, low: int, high: int) -> None:
    with pytest.raises(ValueError, match="rendezvous"):
        RendezvousParameters(backend, "", "", low, high)


@pytest.mark.parametrize(
    ("value", "number"), [(3, 3), ("3", 3), (" 3 ", 3), ("-1", -1), (True, 1), (2.5, 2), (None, None)]
)
def test_as_int(value: object, number: int | None) -> None:
    assert _params(k=value).get_as_int("k", 7) == number
    assert _params().get_as_int("k", 7) == 7
    assert _params().get_as_int("k") is None


@pytest.mark.parametrize("value", ["abc", "", "2.0", "0x10", [1], float("inf"), float("nan")])
def test_invalid_ints_are_named(value: object) -> None:
    with pytest.raises(UserError, match="join_timeout=") as caught:
        _params(join_timeout=value).get_as_int("join_timeout")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        (["1", "true", "T", "Yes", "y", True, 1], True),
        (["0", "false", "F", "No", "n", False, 0], False),
        ([None], None),
    ],
)
def test_as_bool(values: list[object], flag: bool | None) -> None:
    assert [_params(k=value).get_as_bool("k") for value in values] == [flag] * len(values)


@pytest.mark.parametrize("value", [2, -1, "", " true ", "on", "2", 1.0])
def test_invalid_bools_are_named(value: object) -> None:
    with pytest.raises(UserError, match="is_host="):
        _params(is_host=value).get_as_bool("is_host")
    assert _params().get_as_bool("is_host", False) is False
    assert _params(is_host=None).get_as_bool("is_host", True) is None
