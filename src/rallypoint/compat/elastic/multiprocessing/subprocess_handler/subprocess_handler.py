"""In the place of `torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rallypoint.base.numa import NumaOptions

__all__ = ["SubprocessHandler"]


class SubprocessHandler:
    """A program that runs, in a process group of its own. `proc` is its `subprocess.Popen`.

    Args:
        entrypoint: the program.
        args: its arguments, made strings by `str`.
        env: what is added to this process's environment.
        stdout: the file for its standard output; None or empty for this process's own.
        stderr: the same for standard error.
        local_rank_id: which worker of this node it is.
        numa_options: which processors it is bound to; None for any. With them this node's workers are counted by
            `LOCAL_WORLD_SIZE` in `env`.
    """

    def __init__(
        self,
        entrypoint: str,
        args: Sequence[Any],
        env: Mapping[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: NumaOptions | None,
    ) -> None:
        self.local_rank_id = local_rank_id
        self._files = ExitStack()
        try:
            self._stdout, self._stderr = self._opened(stdout), self._opened(stderr)
            full = {**os.environ, **env}
            with _on(numa_options, full, local_rank_id):
                self.proc = subprocess.Popen(
                    [entrypoint, *map(str, args)],
                    env=full,
                    stdout=self._stdout,
                    stderr=self._stderr,
                    start_new_session=True,
                )
        except BaseException:
            self._files.close()
            raise

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal (SIGTERM if none is named) to the program and whatever it has started; close the files.

        This does not wait; `proc.wait()` does that.
        """
        if self.proc.poll() is None:
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
        self._files.close()

    def _opened(self, path: str | None) -> IO[bytes] | None:
        return self._files.enter_context(open(path, "wb")) if path else None


@contextmanager
def _on(options: NumaOptions | None, env: Mapping[str, str], local_rank: int) -> Iterator[None]:
    """Have this thread run where the worker shall: a process begins where the thread that starts it runs."""
    found = None
    if options is not None:
        from rallypoint.base.topology import worker_cpus

        found = worker_cpus(options, int(env.get("LOCAL_WORLD_SIZE", local_rank + 1)), env)
    if found is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, found[local_rank])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
