from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.devices import cuda_count, xpu_count
from rallypoint.base.errors import UserError
from rallypoint.cli.sizes import local_world_size, parse_nnodes


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_nnodes(low: int, more: int) -> None:
    assert parse_nnodes(f"{low}") == (low, low)
    assert parse_nnodes(f"{low}:{low + more}") == (low, low + more)
    assert parse_nnodes(f" {low} : {low + more} ") == (low, low + more)


@pytest.mark.parametrize("text", ["", "a", "1:2:3", ":2", "1:", "0", "-1", "2:1", "0:1", "1.5", ":"])
def test_bad_nnodes(text: str) -> None:
    with pytest.raises(UserError, match=r"^PET_NNODES=") as caught:
        parse_nnodes(text, "PET_NNODES")
    assert repr(text) in str(caught.value)


@given(st.text(max_size=8))
def test_any_nnodes_is_read_or_refused(text: str) -> None:
    try:
        low, high = parse_nnodes(text)
    except UserError:
        return
    assert 1 <= low <= high


@pytest.mark.parametrize(("text", "size"), [("1", 1), (" 2 ", 2), ("1_0", 10)])
def test_a_number_of_workers(text: str, size: int) -> None:
    assert local_world_size(text, {}) == size


@pytest.mark.parametrize("text", ["0", "-1"])
def test_no_workers(text: str) -> None:
    with pytest.raises(UserError, match=f"--nproc-per-node='{text}'"):
        local_world_size(text, {})


def test_processors_are_counted_by_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert local_world_size("cpu", {}) == 1
        assert local_world_size("auto", {"CUDA_VISIBLE_DEVICES": ""}) == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_gpus_are_counted_where_there_are_some() -> None:
    count = cuda_count({})
    if count:
        assert local_world_size("gpu", {}) == local_world_size("auto", {}) == count
    else:
        cards = xpu_count({}, integrated=False)
        assert local_world_size("auto", {}) == (cards or len(os.sched_getaffinity(0)))
        with pytest.raises(UserError, match=r"NVIDIA GPUs, and there is none.* on this machine"):
            local_world_size("gpu", {})


def test_xpus_are_counted_where_there_are_some() -> None:
    count = xpu_count({})
    if count:
        assert local_world_size("xpu", {}) == count
    else:
        with pytest.raises(UserError, match="Intel GPUs, and there is none"):
            local_world_size("xpu", {})
    with pytest.raises(UserError, match="ZE_AFFINITY_MASK='x'"):
        local_world_size("xpu", {"ZE_AFFINITY_MASK": "x"})


def test_hidden_gpus_are_not_counted() -> None:
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=''"):
        local_world_size("gpu", {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("text", ["mps", "privateuseone", "GPU", "two", "", "1.5"])
def test_what_is_neither_number_nor_counted(text: str) -> None:
    with pytest.raises(UserError, match="PET_NPROC_PER_NODE=") as caught:
        local_world_size(text, {}, "PET_NPROC_PER_NODE")
    assert repr(text) in str(caught.value)
