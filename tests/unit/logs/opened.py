"""Outputs of workers with their own console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rallypoint.workers.logs.outputs import WorkerConsole
from rallypoint.workers.logs.specs import LogsDest


class Outputs:
    """Outputs of one start, `of` each local rank; arguments as for `WorkerConsole.open`."""

    def __init__(
        self,
        dest: LogsDest,
        ranks: Iterable[int],
        prefixes: Mapping[int, str],
        stdout: int = 1,
        stderr: int = 2,
        **options: Any,
    ) -> None:
        self.console = WorkerConsole(stdout, stderr)
        try:
            self.of = self.console.open(dest, [*ranks], prefixes, **options)
        except BaseException:
            self.console.close()
            raise

    def close(self) -> None:
        self.console.end(self.of.values())
        self.console.close()
