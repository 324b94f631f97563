"""Enables the flight recorders of torch's process groups, with torch's own variables (`--flight-recorder`).

Laws:

1. The user's settings take precedence, even under their old names.
2. Dumps go to the log folder of this start of the workers. The pipes and sockets that request dumps are in the notice
   directory, which is on a local disk, and are removed with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from rallypoint.agent.facts import attempt_folder
from rallypoint.agent.feature import Feature
from rallypoint.agent.sources import guarded
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.base.private_files import make_private
from rallypoint.observe.hangs.dumps import BUFFER, DUMP, DUMP_ON_TIMEOUT, OLD_NAMES, PER_WORKER, PIPE, SOCKET
from rallypoint.observe.hangs.evidence import dump_folder

if TYPE_CHECKING:
    from rallypoint.agent.spec import VariableSource, Worker
    from rallypoint.workers.context import PContext

log = get_logger(__name__)

ENTRIES = 2000
"""How many operations a worker stores, over all process groups; torch's default."""
_MAX_SOCKET = 100
"""Maximum length of a socket's path in bytes; the kernel allows 107."""


class FlightRecorder(Feature):
    """The flight recorders of one agent's workers."""

    def constants(self) -> Mapping[str, str]:
        return constant_variables(os.environ)

    def variables(self) -> Iterable[VariableSource]:
        return (_PerWorker(),)

    def before_start(self, context: PContext) -> None:
        workers = self.workers
        guarded("the flight recorder", switch_on, context, workers.group.notices, workers.pcontext)


class _PerWorker:
    """Declares the variables from `switch_on`, whose values are known once the log folders exist."""

    names = PER_WORKER

    def variables(self, worker: Worker, environment: Mapping[str, str]) -> Mapping[str, str]:
        return {}


def constant_variables(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that all workers and rounds share. torch reads them on import, so workers can be forked from a
    process that has imported torch.

    Args:
        given: the user's variables.
        given: the user's variables.
    """
    return _unless_given({BUFFER: str(ENTRIES), DUMP_ON_TIMEOUT: "1"}, given)


def switch_on(context: PContext, notices: str, previous: PContext | None) -> None:
    """Add the paths of dumps, and of the pipe or socket that requests them, to the environment of workers that are
    about to start.

    Args:
        context: the workers; their log folders exist.
        notices: the notice directory; empty for none.
        previous: the previous round's workers. Some may continue in their processes, where torch keeps its first
            path.
    """
    attempt = attempt_folder(context.error_files.values())
    folder = dump_folder(os.path.abspath(attempt) if attempt else attempt)  # workers may change their working directory
    variables: dict[str, str] = {}
    if not folder:
        log.warning(
            "flight recorder dumps go to torch's default folder below ~/.cache/torch, because workers have no "
            "log folder (--log-dir=/dev/null)"
        )
    try:
        if folder:
            os.makedirs(folder, exist_ok=True)
            variables[DUMP] = os.path.join(folder, "rank_")
        if notices:
            make_private(notices)
            variables[PIPE] = os.path.join(notices, "flight_recorder_")
    except OSError as error:
        log.warning("the workers cannot be asked for flight recorder dumps: %s", error)
    held = () if previous is None else previous.held
    for local_rank, environment in context.envs.items():
        own = dict(variables)
        if previous is not None and local_rank in held and DUMP in previous.envs[local_rank]:
            own[DUMP] = previous.envs[local_rank][DUMP]
        path = os.path.join(notices, f"worker_server_{local_rank}")
        if PIPE in own and len(os.fsencode(path)) <= _MAX_SOCKET:
            own[SOCKET] = path
        environment.update(_unless_given(own, {**os.environ, **environment}))


def _unless_given(variables: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in variables.items() if not {name, OLD_NAMES.get(name, name)}.intersection(given)
    }
