"""Whether pidfds are available. Linux before 5.3 has none, and a sandbox may deny them.

Law: use built-in modules only, since the reaper imports this file.
"""

import posix


def _has_pidfds() -> bool:
    try:
        posix.close(posix.pidfd_open(posix.getpid()))
        __import__("_signal").pidfd_send_signal(-1, 0)  # no such descriptor exists
    except AttributeError:  # this Python was built for an older kernel
        return False
    except OSError as error:
        return error.errno not in (1, 13, 38)  # EPERM, EACCES, ENOSYS
    return True


HAS_PIDFDS = _has_pidfds()
