"""Runs a command whose system calls the kernel partly denies, like the seccomp profile of a container.

    python tests/denying.py eventfd2=EPERM,pidfd_open=ENOSYS -- rallyrun ...

The calls fail with that error for the command and all its children; a filter cannot be removed again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

NUMBERS = {
    # name: number on x86-64, on aarch64 (tests/unit/hangs/test_system_calls.py looks them up)
    "clone3": (435, 435),
    "close_range": (436, 436),
    "epoll_create1": (291, 20),
    "epoll_pwait2": (441, 441),
    "eventfd2": (290, 19),
    "inotify_init1": (294, 26),
    "memfd_create": (319, 279),
    "openat2": (437, 437),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pipe2": (293, 59),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "setsid": (112, 157),
    "socketpair": (53, 199),
}
OLD_KERNEL = ",".join(
    f"{name}=ENOSYS" for name in ("pidfd_open", "pidfd_send_signal", "clone3", "close_range", "openat2", "epoll_pwait2")
)
"""What Linux 4.18 does not have."""
OLD_SANDBOX = OLD_KERNEL.replace("ENOSYS", "EPERM").replace("clone3=EPERM", "clone3=ENOSYS")
"""The same, denied by a sandbox. With clone3=EPERM, the C library can start no thread and no process."""
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The place in the table above, and the number of the architecture (AUDIT_ARCH_*)."""
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_SET_NO_NEW_PRIVS, _GET_SECCOMP, _SET_SECCOMP, _FILTER = 38, 21, 22, 2


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("if_so", ctypes.c_ubyte), ("if_not", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def why_not() -> str | None:
    """Why this machine cannot deny system calls, or None if it can."""
    if platform.machine() not in MACHINES:
        return f"no numbers of system calls for {platform.machine()}"
    if ctypes.CDLL(None).prctl(_GET_SECCOMP, 0, 0, 0, 0) < 0:  # an emulator's answer, among others
        return "the kernel filters no system calls here"
    return None


def denying(what: str) -> list[str]:
    """What a command line begins with to be denied `what`: names and errors as at the top of this file."""
    return [sys.executable, __file__, what, "--"]


def deny(errors: dict[str, int]) -> None:
    """Have the kernel answer these calls of this process, and of all that it starts, with these errors."""
    place, architecture = MACHINES[platform.machine()]
    lines = [_Instruction(_LOAD, 0, 0, 4), _Instruction(_JUMP_IF_EQUAL, 1, 0, architecture)]
    lines += [_Instruction(_RETURN, 0, 0, _ALLOW), _Instruction(_LOAD, 0, 0, 0)]
    for name, error in errors.items():
        lines.append(_Instruction(_JUMP_IF_EQUAL, 0, 1, NUMBERS[name][place]))
        lines.append(_Instruction(_RETURN, 0, 0, _FAIL | error))
    lines.append(_Instruction(_RETURN, 0, 0, _ALLOW))
    program = _Program(len(lines), (_Instruction * len(lines))(*lines))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, f"prctl: {os.strerror(number)}")


if __name__ == "__main__":
    wanted, separator, *command = sys.argv[1:]
    assert separator == "--", __doc__
    pairs = [each.split("=") for each in wanted.split(",")]
    deny({name: getattr(errno, error) for name, error in pairs})
    os.execvp(command[0], command)
