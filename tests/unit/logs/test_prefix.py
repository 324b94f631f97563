"""Prefixes of console lines."""

from __future__ import annotations

import os

import pytest

from rallypoint.logs.specs import host_label, line_prefixes, with_host

HOST = os.uname().nodename
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "2"}


def test_the_default_names_role_and_local_rank() -> None:
    assert line_prefixes(None, "trainer", {0: 4, 1: 5}) == {0: "[trainer0]:", 1: "[trainer1]:"}


def test_a_template_replaces_three_names_and_leaves_others() -> None:
    template = "[${role_name}|${rank}|${local_rank}|${x}|$] "
    assert line_prefixes(template, "default", {1: 5}) == {1: "[default|5|1|${x}|$] "}


def test_a_template_may_name_host_and_attempt() -> None:
    assert line_prefixes("${host}.${attempt} ", "default", {1: 5}, 3) == {1: f"{os.uname().nodename}.3 "}


def test_an_empty_template_is_the_default() -> None:
    assert line_prefixes("", "default", {0: 0}) == {0: "[default0]:"}


@pytest.mark.parametrize(
    ("when", "environ", "labelled"),
    [
        ("auto", {}, False),
        ("auto", STEP, True),
        ("auto", STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "4"}, False),  # one node of four
        ("auto", {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NNODES": "4"}, True),
        ("auto", {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NNODES": "4"}, False),  # a batch script
        ("auto", STEP | {"SLURM_STEP_NUM_NODES": "two"}, False),
        ("never", STEP, False),
        ("always", {}, True),
    ],
)
def test_where_lines_begin_with_the_host(when: str, environ: dict[str, str], labelled: bool) -> None:
    assert host_label(when, environ) == (f"{HOST}: " if labelled else "")


def test_the_host_stands_once_before_the_prefix() -> None:
    assert with_host(None, "") is None
    assert line_prefixes(with_host(None, "n$3: "), "default", {0: 0}) == {0: "n$3: [default0]:"}
    assert line_prefixes(with_host("${rank} ", "n3: "), "default", {0: 7}) == {0: "n3: 7 "}
    assert with_host("${host} ", "n3: ") == "${host} "
