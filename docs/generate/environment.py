"""The page of environment variables: meanings from environment.toml, variables of flags from the table of flags."""

from __future__ import annotations

import tomllib
from pathlib import Path

from docs.generate.markdown import literal, table

from rallypoint.cli.flags import FLAGS

HEAD = """\
# Environment variables

Flags on the command line override variables. Rallypoint warns about a `PET_` variable that matches no flag, and about a
name that is close to one of its own, such as `RALLYPOINT_SECRETS`.
"""

GROUPS: dict[str, dict[str, dict[str, str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""Kind (`read` or `set`) to title to variable to meaning."""

NO_VARIABLES = frozenset(
    (
        *("ASSIGN_WORKER_RANKS", "CLOCK_BOOTTIME", "DEFAULT_PORT", "TYPE_CHECKING"),
        *("HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "WRONG_VERSION_NUMBER"),
        # Operations of CPython
        *("BEFORE_ASYNC_WITH", "BEFORE_WITH", "LOAD_SPECIAL", "PUSH_EXC_INFO", "RAISE_VARARGS", "RETURN_CONST"),
        *("RETURN_VALUE", "WITH_EXCEPT_START"),
        # The beginning of names
        "SLURM_PMI",
        # Ends of names that `OURS` in cli/convert.py completes
        *(
            "ETCD_PASSWORD",
            "ETCD_PASSWORD_FILE",
            "HTTP_TOKEN_FILE",
            "INCIDENT_ENV",
            "JOBS_DIR",
            "SECRET_FILE",
            "SHIM_PYTHON",
        ),
        *("TERMINATION_GRACE", "TERMINATION_LOG", "VERDICT_FILE"),
    )
)
"""Texts of the source that look like variables but are not."""


def page() -> str:
    """The page, in Markdown."""
    parts = [HEAD, "## Read\n", "### Flags of `rallyrun`\n"]
    given = [flag for flag in FLAGS if flag.from_environment]
    parts.append(table(("variable", "flag"), [(literal(flag.variable), _link(flag.name)) for flag in given]))
    for kind, title in (("read", ""), ("set", "## Set\n")):
        parts += [title] if title else []
        parts += [f"### {name}\n\n{_table(variables)}" for name, variables in GROUPS[kind].items()]
    return "\n".join(parts)


def _link(flag: str) -> str:
    return f"[{literal(flag)}](flags.md#{flag.removeprefix('--')})"


def _table(variables: dict[str, str]) -> str:
    return table(("variable", "meaning"), [(literal(name), text) for name, text in variables.items()])
