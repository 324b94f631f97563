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
def test_conf_is_read_back_as_it_was_written(pairs: list[tuple[str, str]], blank: str) -> None:
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


@given(st.text())
def test_any_conf_text_is_read_or_refused(text: str) -> None:
    try:
        options = parse_rdzv_conf(text)
    except UserError:
        return
    assert all(key and value and "," not in key + value for key, value in options.items())


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
def test_what_is_no_int_is_named(value: object) -> None:
    with pytest.raises(UserError, match="join_timeout=") as caught:
        _params(join_timeout=value).get_as_int("join_timeout")
    assert repr(value) in str(caught.value)


@given(st.sampled_from(["1", "true", "t", "yes", "y"]), st.sampled_from(["0", "false", "f", "no", "n"]), st.data())
def test_as_bool_ignores_case(yes: str, no: str, data: st.DataObject) -> None:
    shout = data.draw(st.sampled_from([str.upper, str.lower, str.title]))
    assert _params(k=shout(yes)).get_as_bool("k") is True
    assert _params(k=shout(no)).get_as_bool("k") is False


@pytest.mark.parametrize(("value", "flag"), [(True, True), (False, False), (1, True), (0, False), (None, None)])
def test_as_bool_of_other_types(value: object, flag: bool | None) -> None:
    assert _params(k=value).get_as_bool("k", True) is flag


@pytest.mark.parametrize("value", [2, -1, "", " true ", "on", "2", 1.0])
def test_what_is_no_bool_is_named(value: object) -> None:
    with pytest.raises(UserError, match="is_host="):
        _params(is_host=value).get_as_bool("is_host")
    assert _params().get_as_bool("is_host", False) is False
