"""A launch configuration in one file (`--config job.toml`), and the effective configuration (`--dry-run`).

    nnodes = "2:4"                    # a flag by name, with dashes or underscores
    nproc-per-node = "gpu"
    standalone = true                 # a flag without a value
    preload = ["torch", "numpy"]      # a list is joined with commas

    [rdzv-conf]                       # the options of --rdzv-conf
    join_timeout = 600

    [env]                             # variables of the workers
    NCCL_DEBUG = "WARN"

    [profile.debug]                   # --config job.toml:debug: replaces or adds to the values above
    nproc-per-node = 1
    [profile.debug.env]
    NCCL_DEBUG = "INFO"

Laws:

1. A value in the file counts like `PET_<NAME>`: the command line and the environment take precedence, and the flag's
   own reader reads it. A variable in `[env]` does not replace one in the environment.
2. A name that is not a flag is refused; the error suggests the most similar flag.
3. `--dry-run` prints a file in the same format.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rallypoint.base.errors import UsageError
from rallypoint.base.flags import Flag
from rallypoint.cli.flags import FLAGS

_TABLES = ("env", "rdzv-conf", "profile")
_NOT_IN_FILE = frozenset({"config", "dry_run"})
_LARGEST = 1024 * 1024
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Config(NamedTuple):
    """The contents of a file: texts of flag values, by the flags' fields, and variables for workers."""

    values: dict[str, str]
    environment: dict[str, str]


def read_config(given: str) -> Config:
    """Read `FILE` or `FILE:PROFILE`.

    Raises:
        UsageError: no such file or profile exists, or it contains an invalid entry.
    """
    path, profile = given, ""
    if not os.path.exists(path) and ":" in given:
        path, _, profile = given.rpartition(":")
    table = _load(path)
    profiles = table.pop("profile", {})
    if not isinstance(profiles, dict) or not all(isinstance(entry, dict) for entry in profiles.values()):
        raise UsageError(f"{path}: profile is not a table of tables; write [profile.NAME]")
    merged = _merged(table, profiles[profile]) if profile in profiles else table
    if profile and profile not in profiles:
        known = f"; it has {', '.join(sorted(profiles))}" if profiles else ", and no other"
        raise UsageError(f"{path} has no profile {profile!r}{known}")
    return _config(given, merged)


def _load(path: str) -> dict[str, Any]:
    import tomllib

    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(f"--config={path} cannot be read: {error.strerror or error}") from None
    if len(data) > _LARGEST:
        raise UsageError(f"--config={path} has more than {_LARGEST} bytes; check that it is the right file")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # not TOML, or not UTF-8
        raise UsageError(f"--config={path} is not valid TOML: {error}") from None


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables; entries of the second replace those of the first, even in inner tables."""
    merged = {_key(name): value for name, value in below.items()}
    for name, value in above.items():
        before = merged.get(_key(name))
        merged[_key(name)] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def _key(name: str) -> str:
    return name.replace("_", "-")


def _config(given: str, table: Mapping[str, Any]) -> Config:
    flags = {_key(flag.dest): flag for flag in FLAGS if flag.dest not in _NOT_IN_FILE}
    values, environment = dict[str, str](), dict[str, str]()
    for name, value in table.items():
        key = _key(name)
        if key == "env":
            environment = _environment(given, value)
            continue
        if key not in flags:
            from rallypoint.cli.similar_names import closest_match

            near = closest_match(key, [*flags, *_TABLES])
            which = f"did you mean {near!r}?" if near else "rallyrun --help lists them"
            raise UsageError(f"{given}: {name!r} is not a flag of rallyrun; {which}")
        flag = flags[key]
        values[flag.dest] = _text(given, flag, value)
    return Config(values, environment)


def _text(given: str, flag: Flag[Any], value: object) -> str:
    """A value as text, as on a command line."""
    name = flag.name.removeprefix("--")
    if flag.read is None:
        if isinstance(value, bool):
            return str(int(value))
        raise UsageError(f"{given}: {name} is {value!r}, but the flag takes no value; write true or false")
    if isinstance(value, dict) and flag.dest == "rdzv_conf":
        return ",".join(f"{key}={_simple(given, f'{name}.{key}', entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return ",".join(_simple(given, name, entry) for entry in value)
    return _simple(given, name, value)


def _simple(given: str, name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    raise UsageError(f"{given}: {name} is {value!r}; write a string, a number, true or false")


def _environment(given: str, table: object) -> dict[str, str]:
    if not isinstance(table, dict):
        raise UsageError(f"{given}: env is not a table; write [env] and then one variable per line")
    for name in table:
        if not _NAME.fullmatch(name) or name.startswith("PET_"):
            raise UsageError(
                f"{given}: {name!r} is not a valid variable for [env]; write flags above [env], under their own names"
            )
    return {name: _simple(given, f"env.{name}", value) for name, value in table.items()}


# The effective configuration


def effective_lines(values: Mapping[str, Any], sources: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Format the configuration as a file for `--config`: set values with their sources, then defaults as comments.

    Args:
        values: the values of all flags, by field, and the script with its arguments.
        sources: the sources of values other than defaults.
        environment: the file's variables for workers.
    """
    flags = [flag for flag in FLAGS if flag.dest not in _NOT_IN_FILE and flag.dest in values]
    given = [flag for flag in flags if values[flag.dest] != flag.default or flag.dest in sources]
    found = {flag: sources.get(flag.dest, "derived") for flag in given}
    lines = [f"{_name(flag)} = {_toml(flag, values[flag.dest])}  # {source}" for flag, source in found.items()]
    lines += [f"# {_name(flag)} = {_toml(flag, flag.default)}" for flag in flags if flag not in given]
    if environment:
        lines += ["", "[env]"]
        for name, value in environment.items():
            own = os.environ.get(name, value)
            lines.append(f"{name} = {_quoted(own)}  # {'the environment' if own != value else values['config']}")
    command = " ".join([values["training_script"], *values["training_script_args"]])
    return [f"# rallyrun ... {command}".replace("\n", " "), *lines]


def _name(flag: Flag[Any]) -> str:
    return flag.name.removeprefix("--")


def _toml(flag: Flag[Any], value: object) -> str:
    if flag.read is None:
        return str(bool(value)).lower()
    if isinstance(value, tuple | list | set | frozenset):
        return _quoted(",".join(map(str, _in_order(value))))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return _quoted("" if value is None else str(value))


def _in_order(values: Iterable[object]) -> list[object]:
    return sorted(values, key=str) if isinstance(values, set | frozenset) else [*values]


def _quoted(text: str) -> str:
    """Format a TOML string; unprintable characters are escaped."""
    escaped = (
        f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}" for character in text
    )
    return (
        '"'
        + "".join(
            character if character.isprintable() and character not in '"\\' else escape
            for character, escape in zip(text, escaped, strict=True)
        )
        + '"'
    )
