"""Loses packets at random at one network interface, for as long as it runs.

    python -m tests.faults.loss INTERFACE PERCENT

It needs only the kernel's BPF, which exists where `sch_netem` does not: a program of five instructions at the interface
drops each incoming frame with the given probability. The kernel removes it when this process ends. The process prints
`ready` on standard output, and ends with its standard input.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys

BPF = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _LINK_CREATE = 5, 28
_TYPE_XDP, _ATTACH_XDP, _GENERIC = 6, 37, 2
_DROP, _PASS = 1, 2
_CALL, _EXIT, _MOVE, _JUMP_IF_LESS_32 = 0x85, 0x95, 0xB7, 0xA6
_GET_PRANDOM_U32 = 7


def _instruction(code: int, offset: int = 0, immediate: int = 0) -> bytes:
    return struct.pack("<BBhI", code, 0, offset, immediate)


def _program(percent: float) -> bytes:
    """One random number for each frame: below the threshold it is dropped, else it goes on its way."""
    return b"".join(
        [
            _instruction(_CALL, immediate=_GET_PRANDOM_U32),
            _instruction(_JUMP_IF_LESS_32, offset=2, immediate=int(percent / 100 * 2**32)),
            _instruction(_MOVE, immediate=_PASS),
            _instruction(_EXIT),
            _instruction(_MOVE, immediate=_DROP),
            _instruction(_EXIT),
        ]
    )


def _bpf(command: int, attributes: bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    found = int(libc.syscall(BPF[platform.machine()], command, buffer, len(attributes)))
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"bpf({command}): {os.strerror(error)}")
    return found


def lose(interface: str, percent: float) -> int:
    """Begin to lose what comes in at an interface of this network namespace; ends with the descriptor returned.

    Raises:
        OSError: the kernel will not, or there is no such interface.
    """
    code, license_ = ctypes.create_string_buffer(_program(percent)), ctypes.create_string_buffer(b"GPL")
    count = (len(code) - 1) // 8
    load = struct.pack("<IIQQ", _TYPE_XDP, count, ctypes.addressof(code), ctypes.addressof(license_))
    program = _bpf(_PROG_LOAD, load.ljust(48, b"\0"))
    try:
        link = struct.pack("<IIII", program, socket.if_nametoindex(interface), _ATTACH_XDP, _GENERIC)
        return _bpf(_LINK_CREATE, link)
    finally:
        os.close(program)


if __name__ == "__main__":
    held = lose(sys.argv[1], float(sys.argv[2]))
    print("ready", flush=True)
    sys.stdin.read()
