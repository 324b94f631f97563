"""Every flag of the command line, as one table (contract section 1.1).

A row says how a flag is spelled, what its text is read as, what holds where it is absent, and whether the environment
may give it. The parser, the reading of `PET_*` variables and the help page all come from here.
"""

from __future__ import annotations

from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

SWITCH = None
"""The `read` of a flag that takes no value."""


class Flag(NamedTuple):
    """One row.

    `name` is the dashed long spelling; `read` turns the text of a value into the value (ArgumentTypeError if it cannot)
    and is `SWITCH` for a flag without a value; `choices` bind the command line only, never the environment.
    """

    name: str
    read: Callable[[str], object] | None
    default: object
    help: str
    short: str = ""
    choices: tuple[str, ...] | None = None
    from_environment: bool = True

    @property
    def dest(self) -> str:
        """The name of the value: `nproc_per_node` for `--nproc-per-node`."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All ways to write it: short, dashed and underscored, each once."""
        return tuple(dict.fromkeys(filter(None, (self.short, self.name, f"--{self.dest}"))))

    @property
    def variable(self) -> str:
        """The environment variable that may give it: `PET_NPROC_PER_NODE`."""
        return f"PET_{self.dest.upper()}"


class ShowVersion(Action):
    """The flag `--version`: prints the command's name and the installed version on stdout, and ends with code 0."""

    def __init__(self, option_strings: list[str], dest: str, command: str, default: str = SUPPRESS) -> None:
        super().__init__(option_strings, SUPPRESS, nargs=0, default=default, help="Show the version and exit.")
        self._command = command

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None) -> None:
        """Print and end the process; the version is looked up only now, since the look-up is slow to import."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(self._command, version("rallypoint"))
        except PackageNotFoundError:
            print(self._command, "(unknown version: the package rallypoint is not installed)")
        parser.exit()


def whole_number(text: str) -> int:
    """Read a whole number, as `int` does."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number, such as 3") from None


def number(text: str) -> float:
    """Read a number, as `float` does."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number, such as 0.5") from None


def split_filters(text: str) -> tuple[str, ...]:
    """Read texts with commas between; two commas in a row are one comma of the text (contract section 6.6)."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))


def module_names(text: str) -> tuple[str, ...]:
    """Read names of modules with commas between; none in an empty text."""
    names = tuple(part.strip() for part in text.split(",")) if text else ()
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            where = f" in {text!r}" if name != text else ""
            raise ArgumentTypeError(f"{name!r}{where} is not the name of a module, such as torch or torch.distributed")
    return names


def store_peers(text: str) -> str:
    """Read who may connect to worker stores."""
    from rallypoint.base.errors import UserError
    from rallypoint.coordinator.store_peers import parse_policy

    try:
        parse_policy(text)
    except UserError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def when(text: str) -> str:
    """Read whether something is done, as ls and grep read it for colours."""
    if text not in ("auto", "always", "never"):
        raise ArgumentTypeError(f"{text!r} is none of auto, always, never")
    return text


FLAGS = (
    Flag(
        "--nnodes",
        str,
        "1:1",
        "How many nodes take part: N, or MIN:MAX for a job that goes on while at least MIN are there.",
    ),
    Flag(
        "--nproc-per-node",
        str,
        "1",
        "Workers on this node: a number; cpu, gpu or xpu for as many as this process may use; auto for the GPUs or "
        "XPUs if there are any, else cpu.",
    ),
    Flag(
        "--rdzv-backend",
        str,
        "static",
        "How the nodes agree on who takes part: static (ranks by hand), c10d (a server in the agent that the endpoint "
        "names; with --rdzv-conf=store_type=file, a file that all nodes share), etcd or etcd-v2 (an etcd of yours), or "
        "the name of an installed plug-in.",
    ),
    Flag(
        "--rdzv-endpoint",
        str,
        "",
        "Where they meet, as host:port; the port may be left out with c10d, where it is 29400, and with etcd and "
        "etcd-v2, where it is 2379. The path of the file with store_type=file. An etcd may have several, "
        "with commas between.",
    ),
    Flag("--rdzv-id", str, "none", "The job's id; nodes with the same id belong together."),
    Flag("--rdzv-conf", str, "", "Options of the backend, as key=value,key=value: join_timeout=600, is_host=true."),
    Flag(
        "--standalone",
        SWITCH,
        False,
        "A job of this machine alone: meets at a free port under a fresh id, whatever --rdzv-backend, --rdzv-endpoint "
        "and --rdzv-id say.",
    ),
    Flag("--max-restarts", whole_number, 0, "How many failures the job survives before it gives up."),
    Flag(
        "--monitor-interval",
        number,
        0.1,
        "Bounds a safety check only, in seconds above 0: it runs once a minute, or this often if that is less often; "
        "workers are watched without polling.",
    ),
    Flag(
        "--start-method",
        str,
        "spawn",
        "How workers that are functions are started, as with --run-path; of no effect on other scripts and programs.",
        choices=("spawn", "fork", "forkserver"),
    ),
    Flag("--event-log-handler", str, "null", "Where events go: null, console, or the name of an installed handler."),
    Flag("--role", str, "default", "The role of this node's workers."),
    Flag("--module", SWITCH, False, "Run the script as a module, as python -m does.", short="-m"),
    Flag("--no-python", SWITCH, False, "Run the script as a program of its own, without python before it."),
    Flag(
        "--run-path",
        SWITCH,
        False,
        "Run the script inside a worker that --start-method makes from this interpreter, as runpy.run_path does.",
    ),
    Flag("--log-dir", str, None, "Folder for logs; each run makes a folder of its own in it."),
    Flag(
        "--redirects",
        str,
        "0",
        "Streams that go to files only: 1 is stdout, 2 stderr, 3 both, 0 none; or per local rank, as 0:3,1:2.",
        short="-r",
    ),
    Flag("--tee", str, "0", "Streams that go to files and to the console, written like --redirects.", short="-t"),
    Flag("--local-ranks-filter", str, "", "Local ranks shown on the console, as 0,2; empty shows all."),
    Flag(
        "--duplicate-stdout-filters",
        split_filters,
        (),
        "Texts with commas between (two in a row are a comma of the text); teed lines that hold one also go to a file "
        "of their own.",
    ),
    Flag("--duplicate-stderr-filters", split_filters, (), "The same for stderr."),
    Flag(
        "--node-rank",
        whole_number,
        0,
        "This node's rank. Required of nodes after the first with static; a wish with other backends.",
    ),
    Flag("--master-addr", str, "127.0.0.1", "Address of node 0, with static and no --rdzv-endpoint."),
    Flag(
        "--master-port", whole_number, None, "Port of node 0, with static and no --rdzv-endpoint; 29500 if not given."
    ),
    Flag("--local-addr", str, None, "Address of this node that the others shall use; found out if not given."),
    Flag(
        "--logs-specs",
        str,
        None,
        "How output is laid out: default, or the name of an installed plug-in.",
        from_environment=False,
    ),
    Flag(
        "--numa-binding",
        str,
        None,
        "Bind each worker to processors near its GPU: those of its NUMA node or socket, cores of its own, or those "
        "behind one cache.",
        choices=("node", "socket", "exclusive", "core-complex"),
        from_environment=False,
    ),
    Flag(
        "--signals-to-handle",
        str,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "Signals that are passed on to the workers and end the job, with commas between.",
    ),
    Flag(
        "--shutdown-timeout",
        whole_number,
        None,
        "Seconds from such a signal to SIGKILL; if not given, TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30.",
    ),
    Flag("--virtual-local-rank", SWITCH, False, "Every worker sees local rank 0 and one GPU."),
    Flag(
        "--preload",
        module_names,
        (),
        "Modules with commas between, such as torch, that are imported once on this node; restarted workers are forked "
        "from there, in milliseconds.",
    ),
    Flag(
        "--store-peers",
        store_peers,
        "",
        "Who may connect to the store of the workers: members (the nodes of the round), any, or addresses and networks "
        "with commas between, such as members,10.0.0.0/8; if not given, members where their addresses are known.",
    ),
    Flag(
        "--host-prefix",
        when,
        "auto",
        "Whether this host's name stands before each line of the log, of the report and of teed output: always, never, "
        "or auto for where srun merges the lines of several nodes.",
    ),
)
"""The flags, in the order of the help page."""
