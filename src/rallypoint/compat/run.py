"""Replaces `torch.distributed.run`: the command line as functions.

`rallyrun`'s table parses the flags; an `argparse.Namespace` carries them here, as torch's callers expect.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.agent.launch import LaunchConfig, elastic_launch
from rallypoint.cli.convert import STATIC_PORT, config_from_options, limit_threads, local_world_size
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.parse import Options, build_parser, parse, parse_nnodes
from rallypoint.compat.names import names_of
from rallypoint.failures.record import record
from rallypoint.workers.functions.worker import run_script_path

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

__getattr__ = names_of(__name__)

_SOURCES = "rallypoint_sources"
"""Where a namespace stores which values the user set, and where. No flag has this name."""

_POSITIONAL = ("training_script", "training_script_args")


def get_args_parser() -> argparse.ArgumentParser:
    """The parser for all flags, to which callers can add their own. `PET_*` variables are its defaults."""
    parser = build_parser()
    defaults = vars(_namespace(parse(["no script"], os.environ)))
    parser.set_defaults(**{name: value for name, value in defaults.items() if name not in (*_POSITIONAL, _SOURCES)})
    return parser


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; None for this process's own. Raises SystemExit after a usage error."""
    return _namespace(parse(sys.argv[1:] if args is None else args, os.environ))


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """The minimum and maximum number of nodes in `--nnodes`. Raises UserError."""
    return parse_nnodes(nnodes)


def determine_local_world_size(nproc_per_node: str) -> int:
    """The number of workers that `--nproc-per-node` means on this node. Raises UserError."""
    return local_world_size(nproc_per_node, os.environ)


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """Where the nodes meet; for `static` without an endpoint, `--master-addr` and `--master-port`."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{STATIC_PORT if args.master_port is None else args.master_port}"
    return str(args.rdzv_endpoint)


def get_use_env(args: argparse.Namespace) -> bool:
    """Whether workers get their local rank only from the environment."""
    return bool(getattr(args, "use_env", True))


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """The configuration, the entry point, and its arguments. Raises UserError."""
    config, program, arguments = config_from_options(_options(args), os.environ)
    return config, program, list(arguments)


def run(args: argparse.Namespace) -> None:
    """Run this node's part of the job to its end.

    Raises:
        UserError: a flag has an unusable value.
        ChildFailedError: workers failed.
        RendezvousError: the nodes did not form a round.
        SignalException: a signal ended this process.
    """
    config, program, arguments = config_from_args(args)
    limit_threads(config, os.environ)
    elastic_launch(config, program)(*arguments)


@record
def main(args: Sequence[str] | None = None) -> None:
    """Parse a command line and run it; None for this process's own. Raises as `run` does."""
    run(parse_args(args))


def _namespace(options: Options) -> argparse.Namespace:
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in options.flat().items()}
    return argparse.Namespace(**values, **{_SOURCES: options.sources})


def _options(args: argparse.Namespace) -> Options:
    """Create `Options` from a namespace, which may come from a parser without sources, or have changed since."""
    rows = {flag.dest: flag for flag in FLAGS}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name in rows or name in _POSITIONAL
    }
    changed = {name: rows[name].name for name, value in values.items() if name in rows and value != rows[name].default}
    return Options.from_values(values, {**changed, **getattr(args, _SOURCES, {})})


if __name__ == "__main__":
    from rallypoint.cli.rallyrun import main as command

    sys.exit(command())
