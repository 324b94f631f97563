"""The digits of --redirects and --tee."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import UserError
from rallypoint.logs.specs import Std, to_map


@pytest.mark.parametrize(("text", "value"), [("0", Std.NONE), ("1", Std.OUT), ("2", Std.ERR), ("3", Std.ALL)])
def test_one_digit_is_one_value_for_all(text: str, value: Std) -> None:
    assert Std.from_str(text) == value
    assert isinstance(Std.from_str(text), Std)


def test_pairs_name_local_ranks_and_the_last_one_of_a_rank_counts() -> None:
    assert Std.from_str("0:1,3:2") == {0: Std.OUT, 3: Std.ERR}
    assert Std.from_str("0:1,0:2") == {0: Std.ERR}


@pytest.mark.parametrize("text", ["4", "x", "", " 1", "10:1", "0:1,", "0:1, 1:2", "0:4", "-1", "٣", "1\n"])
def test_anything_else_is_refused_with_the_value_and_what_is_allowed(text: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(text))) as caught:
        Std.from_str(text)
    assert "[0-3]" in str(caught.value)
    assert "[0-9]:[0-3]" in str(caught.value)


@given(st.text(alphabet="0123456789:,-x ", max_size=12))
def test_texts_are_understood_or_refused_and_nothing_else(text: str) -> None:
    fits = re.match(r"^(?:[0-3]|(?:[0-9]:[0-3],)*[0-9]:[0-3])\Z", text) is not None
    try:
        Std.from_str(text)
    except UserError:
        assert not fits
    else:
        assert fits


def test_a_map_has_every_local_rank_once() -> None:
    assert to_map(Std.ERR, 2) == {0: Std.ERR, 1: Std.ERR}
    assert to_map({0: Std.OUT, 5: Std.ERR}, 2) == {0: Std.OUT, 1: Std.NONE}
    assert to_map(Std.ALL, 0) == {}
