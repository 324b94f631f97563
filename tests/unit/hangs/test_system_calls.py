"""Our numbers of system calls, for each machine, compared with the kernel's headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rallypoint.observe.hangs.waits import CALLS
from tests import denying
from tests.faults.loss import BPF

HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),  # it has the generic numbers
}


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_of_system_calls(machine: str) -> None:
    header = next((path for name in HEADERS[machine] if (path := Path(name)).exists()), None)
    if header is None:
        pytest.skip(f"there are no headers of the kernel for {machine} (linux-libc-dev)")
    wanted = {
        name: int(number) for name, number in re.findall(r"define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    }
    wanted.setdefault("newfstatat", wanted.get("fstatat", -1))
    calls = CALLS[machine].split()
    ours = dict(zip(calls[1::2], map(int, calls[::2]), strict=True)) | {"bpf": BPF[machine]}
    ours |= {name: numbers[denying.MACHINES[machine][0]] for name, numbers in denying.NUMBERS.items()}
    assert {name: number for name, number in ours.items() if wanted.get(name) != number} == {}
