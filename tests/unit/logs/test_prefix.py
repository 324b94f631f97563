"""Prefixes of console lines."""

from __future__ import annotations

import os

from rallypoint.logs.prefix import line_prefixes


def test_the_default_names_role_and_local_rank() -> None:
    assert line_prefixes(None, "trainer", {0: 4, 1: 5}) == {0: "[trainer0]:", 1: "[trainer1]:"}


def test_a_template_replaces_three_names_and_leaves_others() -> None:
    template = "[${role_name}|${rank}|${local_rank}|${x}|$] "
    assert line_prefixes(template, "default", {1: 5}) == {1: "[default|5|1|${x}|$] "}


def test_a_template_may_name_host_and_attempt() -> None:
    assert line_prefixes("${host}.${attempt} ", "default", {1: 5}, 3) == {1: f"{os.uname().nodename}.3 "}


def test_an_empty_template_is_the_default() -> None:
    assert line_prefixes("", "default", {0: 0}) == {0: "[default0]:"}
