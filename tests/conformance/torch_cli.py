"""The answers of torch's own launcher to command lines: cases come as JSON on stdin, answers go as JSON to stdout.

It is a program, so that torch is imported once, and never by the tests themselves.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any

import torch.distributed.run as launcher
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def _plain(value: Any) -> Any:
    """The value as JSON can carry it, flags of streams as numbers."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return sorted(value) if isinstance(value, set) else value


def _parse(arguments: list[str]) -> dict[str, Any]:
    return dict(vars(launcher.parse_args(arguments)))


def _convert(arguments: list[str]) -> dict[str, Any]:
    config, program, rest = launcher.config_from_args(launcher.parse_args(arguments))
    shown = {name: _plain(value) for name, value in vars(config).items() if name not in ("logs_specs", "numa_options")}
    specs = config.logs_specs
    streams = {name: _plain(getattr(specs, name)) for name in ("_redirects", "_tee", "_local_ranks_filter")}
    return {"config": shown, "streams": streams, "program": program, "arguments": rest}


def _run(arguments: list[str]) -> str:
    try:
        launcher.main(arguments)
    except ChildFailedError:
        return "workers ran"
    raise SystemExit(0)


_QUESTIONS = {"parse": _parse, "convert": _convert, "run": _run}


def _answer(question: str, arguments: list[str], environ: dict[str, str]) -> dict[str, Any]:
    before = dict(os.environ)
    os.environ.update(environ)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return {"value": _QUESTIONS[question](arguments)}
    except SystemExit as end:
        return {"exit": end.code}
    except Exception as error:
        return {"exit": 1, "error": repr(error)}
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    json.dump([_answer(*case) for case in json.load(sys.stdin)], sys.stdout)
