"""Whether this process may be forked after the imports, as far as that can be detected.

A fork copies memory and one thread. It copies no other thread (a lock that one held stays held forever), no
accelerator's context, and no child; and sockets, pipes, event loops and shared memory (so the locks and queues of
`multiprocessing`) would be one for all copies.

Law: threads that their own library ends before each fork (OpenBLAS does, by pthread_atfork) are no obstacle, and are
    recognised by a trial fork: they are gone after it.
"""

from __future__ import annotations

import posix
import select
import sys

from rallypoint.workers.preload.threads import describe_threads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

_SIGKILL = 9
_FORK_TEST_TIMEOUT = 5.0
"""Seconds for a copy that ends at once."""
_DEVICES = (
    *("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/davinci", "/dev/habanalabs", "/dev/neuron"),
    *("/dev/vfio/", "/dev/infiniband/"),
)
_SHARED = (
    *("socket:", "pipe:", "anon_inode:[eventpoll]", "anon_inode:[io_uring]", "anon_inode:inotify"),
    *("anon_inode:[eventfd]", "anon_inode:[timerfd]", "anon_inode:[signalfd]"),
)
_STANDARD = (0, 1, 2)
"""The standard descriptors, which are replaced in each copy."""
_OPENMP_REGISTRATION = "/dev/shm/__KMP_REGISTERED_LIB_"
"""The file by which LLVM's and Intel's OpenMP detect a second one in a process; they recreate it in each copy."""
_INITIALIZED = (("torch", "cuda"), ("torch", "xpu"), ("torch", "npu"), ("torch", "hpu"))


def fork_obstacle(ours: Collection[int] = ()) -> str | None:
    """What the imports did that prevents a fork, as text; None if nothing is known. Does not fork.

    Args:
        ours: descriptors that the imports have not opened.
    """
    return _accelerator() or _child() or _descriptor(ours) or _memory()


def threads() -> list[str]:
    """The kernel's numbers of the threads of this process."""
    return posix.listdir("/proc/self/task")


def _accelerator() -> str | None:
    for package, name in _INITIALIZED:
        module = getattr(sys.modules.get(package), name, None)
        asked = getattr(module, "is_initialized", None)
        if asked is not None and asked():
            return f"it initializes {package}.{name}"
    for target in _open().values():
        if target.startswith(_DEVICES):
            return f"it opens the device {target}"
    return None


def _child() -> str | None:
    try:
        posix.waitid(posix.P_ALL, 0, posix.WEXITED | posix.WNOHANG | posix.WNOWAIT)
    except ChildProcessError:
        return None
    return "it starts a process that goes on"


def _descriptor(ours: Collection[int]) -> str | None:
    for fd, target in _open().items():
        if fd not in ours and fd not in _STANDARD and target.startswith(_SHARED):
            return f"it opens a descriptor that copies would share ({target})"
    return None


def _memory() -> str | None:
    with open("/proc/self/maps", "rb") as lines:
        for line in lines:
            fields = line.split(maxsplit=5)
            name = fields[5].decode(errors="replace").rstrip() if len(fields) > 5 else "without a name"
            if fields[1].endswith(b"s") and b"w" in fields[1] and not name.startswith(_OPENMP_REGISTRATION):
                return f"it maps memory that copies would share ({name})"
    return None


def thread_obstacle() -> str | None:
    """Whether there are threads that stay when this process is forked, or prevent that; a text as above.

    Hooks that run at a fork may write something: the output of the imports should have been read before.
    """
    if len(threads()) == 1:
        return None
    pid = posix.fork()
    if pid == 0:
        posix._exit(0)
    fd = posix.pidfd_open(pid)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    ended = bool(poller.poll(_FORK_TEST_TIMEOUT * 1000))
    if not ended:
        posix.kill(pid, _SIGKILL)
    posix.waitpid(pid, 0)
    posix.close(fd)
    if not ended:
        return "a copy, made to try it out, hangs"
    more = len(threads()) - 1
    return (
        f"it starts {more} thread{'s' * (more > 1)} that stay{'s' * (more == 1)}: {describe_threads()}"
        if more
        else None
    )


def _open() -> dict[int, str]:
    found = {}
    for name in posix.listdir("/proc/self/fd"):
        try:
            found[int(name)] = posix.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor by which they were listed
            continue
    return found
