"""All targets by name, and files that decode foreign bytes without a target, with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz import clusters, control, coordinator, etcds, local, planes, stores
from tests.fuzz.target import Target

TARGETS: Mapping[str, Target] = {
    **control.TARGETS,
    **coordinator.TARGETS,
    **planes.TARGETS,
    **stores.TARGETS,
    **etcds.TARGETS,
    **local.TARGETS,
    **clusters.TARGETS,
}

_KERNEL = "the kernel writes what is read"
_OURS = "both ends are ours, over a pair of sockets or a memory file that nobody else has, as the same user"

TRUSTED: Mapping[str, str] = {
    "base/inotify.py": _KERNEL,
    "base/nvml.py": "the driver's library fills what is read",
    "base/process_table.py": _KERNEL,
    "base/python_memory.py": "memory of processes of its user: types are compared, and loops and lengths have bounds",
    "base/netlink.py": _KERNEL,
    "failures/texts.py": "texts that were read elsewhere, as UTF-8 and back",
    "workers/logs/outputs.py": "a number that the kernel fills in",
    "cli/demo/job.py": "what the demo's own workers tell, through a pipe in a folder of its user",
    "cli/demo/worker.py": "its own checkpoint, and numbers of the demo's own workers, over loopback",
    "inprocess/rounds.py": "lines and a file of the agent, in a folder that only its user may enter; each is checked",
    "observe/hangs/unpickle.py": "a child with little memory and time reads the pickle; its JSON is the target `dumps`",
    "clusters/preflight/run.py": "lines of a child of our own",
    "cli/convert.py": "our own random bytes",
    "features/incidents.py": _KERNEL,
    "features/wrap/program.py": _KERNEL,
    "cli/config.py": "a file that the user has named, of bounded size, by tomllib; each value is checked",
    "cli/following.py": "our own lines, in what the terminal can show of them",
    "features/local_jobs.py": "lines of printable text in a file of bounded size; each field is checked",
    "features/kept_reports.py": "the same",
    "agent/third_party.py": "what agents of one job say over the store of another's handler",
    "rendezvous/handler.py": "the same",
    "rendezvous/elastic.py": "our own random bytes",
    "compat/handlers.py": "a value of the user's own store as text",
    "control/etcd/local.py": "answers and log of an etcd that this process has started",
    "workers/logs/specs.py": "a name that becomes a folder's",
    "rendezvous/shared_state.py": "base64 with errors in words; then `states`",
    "control/election/journal.py": "the name of a key of ours",
    "observe/telemetry/json_lines.py": "what an event of ours has in it as JSON",
    "observe/telemetry/handlers.py": "the line of an event of ours as text",
    "workers/functions/worker.py": "pickles of a child that runs the user's own function, as the same user",
    "workers/reaper/protocol.py": _OURS,
    "features/preload/client.py": "no decoding of its own: `workers/reaper/protocol.py`",
    "features/preload/imports.py": "the kernel writes some of it; the user's own sources, in a process of its own",
}
"""Files that turn bytes or texts into something, and why what they read needs no target of its own."""
