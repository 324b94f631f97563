"""Incident bundles: one node's files about one failure in a small folder, and the index over all nodes. Also displays a
folder's bundles for `rallyctl report`.

    DIR/<job>/<incident>/<host>-<pid>/incident.json ...     one folder per node
    DIR/<job>/<incident>/index.json                         the job's state, written by the coordinator's node

`docs/reference/incident-bundle.md` describes each file. Laws:

1. A bundle never exceeds its size limit: the most important files come first, and those without room are listed.
2. A folder appears complete or not at all.
3. Check names and sizes from another node before writing anything.

Secrets are masked in environment variables, command lines and output. A value is masked if its name suggests a secret,
or if it looks like a token. Masking too much is better than too little: a masked value can be requested later, but a
value on a shared disk cannot be taken back. Only variables that help to understand a failure are saved.

Law: each search looks ahead only a bounded distance. Output can have lines of half a megabyte, and no other thread of
the agent runs during a search.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from shutil import rmtree
from typing import Any, NamedTuple

import msgspec

from rallypoint.base.log import printable
from rallypoint.control.protocol.validation import decoded
from rallypoint.observe.hangs.messages import deflated, inflated

MASK = "<masked>"

_SECRET_NAME = re.compile(
    r"secret|token|passw|passphrase|(?:^|[_\-.])(?:pass|pwd?|auth|pat|keys?|cookie|sas|sig|dsn)(?:$|[_\-.])|apikey"
    r"|accesskey|credential|private|signature|authoriz|bearer|connection_?string|webhook"
    r"|(?<!com)(?<!by)(?<!tres)(?<!under)(?<!over)pass$|(?<!^)(?<!old)pwd$|(?<!^)pw$"
    r"|(?<!mon)(?<!tur)(?<!don)(?<!joc)(?<!hoc)(?<!whis)(?<!hot)keys?$",
    re.IGNORECASE,
)
_NOTICES = "RALLYPOINT_NOTICES"
"""Contains the path of a folder whose name is secret."""
_NOT_SECRET = re.compile(r"^(?:SSH_AUTH_SOCK|XAUTHORITY|TOKENIZERS_PARALLELISM|PWD|OLDPWD)$")
_HELPFUL = re.compile(
    r"^(?:(?:PY)?TORCH|TORCHELASTIC|NCCL|RCCL|GLOO|UCX|UCC|FI_|OFI_|IBV?_|CUDA|CUDNN|CUBLAS|NVIDIA|NVTE|HIP|ROCR|ROCM"
    r"|HSA|GPU|XPU|ZE_|ONEAPI|CCL_|OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|MALLOC|SLURM|PMIX?_|OMPI|MPI|HYDRA|FLUX"
    r"|KUBERNETES|RALLYPOINT|PET_|MASTER_|RANK$|LOCAL_|WORLD_SIZE$|GROUP_|ROLE_|NODE_|NNODES$|PYTHON|LD_|JAX|XLA"
    r"|TF_CONFIG$|TRITON|ACCELERATE|DEEPSPEED|FSDP|MEGATRON|TOKENIZERS|HF_HUB_OFFLINE$|LOGLEVEL$|HOSTNAME$|PATH$|PWD$"
    r"|TMPDIR$|LANG$|LC_|TZ$|VIRTUAL_ENV$|CONDA_PREFIX$|http_proxy$|https_proxy$|no_proxy$)",
    re.IGNORECASE,
)
"""Names of variables that help to understand a failure. They are masked like all others."""

_TOKENS = re.compile(
    r"-----BEGIN [A-Z ]{1,40}-----[\s\S]*?(?:-----END [A-Z ]+-----|$)"
    r"|\b(?:ghp|gho|ghu|ghs|ghr|github_pat|glpat|hf|npm|pypi|xox[abprs]|sk|rk|pk|rpt1|dckr_pat|shpat|ya29)[-_.]"
    r"[A-Za-z0-9_\-.]{12,}"
    r"|\b(?:AKIA|ASIA|AIza)[A-Za-z0-9_\-]{12,}"
    r"|\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]+(?:\.[A-Za-z0-9_\-]*)?"
    r"|\b(?:Bearer|Basic)\s+[A-Za-z0-9+/=_\-.]{8,}",
)
_IN_URL = re.compile(
    r"(?P<before>(?<![a-zA-Z])[a-zA-Z][a-zA-Z0-9+.\-]{0,30}://)(?:[^/\s@]{1,500}|[^/\s@:\"']{0,100}:[^\s\"']{1,500})@(?![^\s\"']{0,500}@)"
)
"""The part before the last @, since passwords can contain / and @."""
_HOOK = re.compile(
    r"(?P<before>https?://(?:hooks\.slack\.com/\w+|[\w.]{0,100}discord(?:app)?\.com/api/webhooks|[\w.\-]{0,100}webhook\.office\.com"
    r"|outlook\.office\.com/webhook)/)[^\s\"']+"
)
_LONG = re.compile(r"(?<![A-Za-z0-9+/_\-.])[A-Za-z0-9+/_\-]{32,}={0,2}(?![A-Za-z0-9+/=_\-.])")
_LEAST_DIFFERENT = 12
_CHANGES = 0.3
"""A word with slashes looks random above this many changes between kinds of characters, per character."""
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
"""The name of a job or a GPU."""
_NAME_OF_PAIR = re.compile(r"(?<![A-Za-z0-9_\-.])(?P<name>[A-Za-z0-9_\-.]{1,400})\\?[\"']?\s{0,4}(?:=|:)\s{0,4}")
_VALUE = re.compile(r"\\?\"(?:[^\"\\]|\\[^\"])*\\?\"|'[^']*'|[^,;\s&\"'}\])]+")
"""A name and its value: `a=b`, `a: b`, and JSON, whose quotes may be escaped."""
_FLAG = re.compile(r"(?P<name>(?<![\w\-])--?[A-Za-z][A-Za-z0-9_\-.]{0,100})(?P<space>\s+)(?P<value>[^\s\-][^\s]*)")
_PASSWORD = re.compile(r"-p(?=[^\s]{0,100}[0-9])[^\s=]{4,}")
"""A password directly after its flag, as with mysql: `-phunter2`."""
_NO_PASSWORD = re.compile(r"[0-9]+(?::[0-9]+)?|[./~].*")
"""A value of `-p` with another meaning: a port, a path."""


def is_secret_name(name: str) -> bool:
    """Whether a variable or flag with this name contains a secret."""
    return not _NOT_SECRET.match(name) and _SECRET_NAME.search(name) is not None


def mask_text(text: str) -> str:
    """Mask anything that looks like a token, and values whose names suggest a secret."""
    text = _TOKENS.sub(MASK, text)
    text = _IN_URL.sub(rf"\g<before>{MASK}@", text)
    text = _HOOK.sub(rf"\g<before>{MASK}", text)
    text = _mask_pairs(text)
    text = _FLAG.sub(_flag, text)
    return _LONG.sub(lambda found: MASK if _looks_random(found[0]) else found[0], text)


def mask_strings(value: Any) -> Any:
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, dict):
        return {name: mask_strings(item) for name, item in value.items()}
    return [mask_strings(item) for item in value] if isinstance(value, list | tuple) else value


def helpful_variables(environ: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Variables that help to understand a failure, and `more`: `NAME*` for a prefix, `*` for all."""
    names = {pattern for pattern in more if not pattern.endswith("*")}
    begin = tuple(pattern[:-1] for pattern in more if pattern.endswith("*"))
    return {
        name: value
        for name, value in environ.items()
        if _HELPFUL.match(name) or name in names or (begin and name.startswith(begin))
    }


def mask_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: MASK if value and (is_secret_name(name) or name == _NOTICES) else mask_text(value)
        for name, value in sorted(environ.items())
    }


def mask_command(words: Sequence[str]) -> list[str]:
    """Mask a command line, including the word after a flag such as `--api-key` or `-p`, and the value of
    `--api-key=...`.
    """
    masked: list[str] = []
    flag = ""
    for word in words:
        name, sign, value = word.partition("=")
        if flag and not word.startswith("-") and _is_secret_value(flag, word):
            masked.append(MASK)
        elif (
            sign
            and name.lstrip("-").replace("-", "_").replace(".", "_").isidentifier()
            and is_secret_name(name.lstrip("-"))
        ):
            masked.append(f"{name}={MASK}")
        elif sign and name == "-p" and _is_secret_value(name, value):
            masked.append(f"-p={MASK}")
        elif _PASSWORD.fullmatch(word):
            masked.append(f"-p{MASK}")
        else:
            masked.append(mask_text(word))
        flag = word if word.startswith("-") and not sign else ""
    return masked


def _is_secret_value(flag: str, value: str) -> bool:
    """Whether the word after a flag is a secret."""
    if flag == "-p":
        return not _NO_PASSWORD.fullmatch(value)
    if flag in {"-u", "--user"}:  # curl's
        return ":" in value.strip(":")
    return is_secret_name(flag.lstrip("-"))


def _flag(match: re.Match[str]) -> str:
    return f"{match['name']}{match['space']}{MASK}" if _is_secret_value(match["name"], match["value"]) else match[0]


def _mask_pairs(text: str) -> str:
    """Mask the values of secret names. Any other value may contain more pairs, as a URL does."""
    pieces: list[str] = []
    end = 0
    for match in _NAME_OF_PAIR.finditer(text):
        if match.start() >= end and is_secret_name(match["name"]) and (value := _VALUE.match(text, match.end())):
            pieces += text[end : match.end()], MASK
            end = value.end()
    return "".join([*pieces, text[end:]])


def _looks_random(text: str) -> bool:
    """Whether a long word is neither language nor a path: it mixes letters of both cases and digits."""
    if _UUID.search(text):
        return False
    if text.count("/") > 1 or text.startswith("/"):  # base64 changes often between kinds of characters
        kinds_in_order = [character.isdigit() + 2 * character.isupper() + 4 * character.islower() for character in text]
        changes = sum(one != other and one > 0 and other > 0 for one, other in pairwise(kinds_in_order))
        return changes >= _CHANGES * len(text)
    kinds = (any(character.isdigit() for character in text), any(character.isalpha() for character in text))
    return all(kinds) and len(set(text)) >= _LEAST_DIFFERENT


VERSION = 1
LIMIT = 10 * 1024 * 1024
"""Maximum size of a bundle's files in bytes."""
ON_DEMAND_LIMIT = 1024 * 1024
"""Maximum size of a bundle for an operator."""
SUMMARY, INDEX = "incident.json", "index.json"
_SUMMARY_ROOM = 256 * 1024
_MAX_FILES = 4096
_MAX_SUMMARY = 1024 * 1024
_MAX_BUNDLES = 100_000
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}(?:/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}){0,2}")


class Piece(NamedTuple):
    """One file of a bundle. `is_whole`: part of it would be worthless. Other files may be cut to their last part."""

    name: str
    data: bytes
    is_whole: bool = False


class Fitted(NamedTuple):
    """The pieces that fit, and a text about those that were cut or left out."""

    pieces: tuple[Piece, ...]
    left_out: tuple[str, ...]


def fit(pieces: Iterable[Piece], limit: int) -> Fitted:
    """Choose the pieces that fit into `limit` bytes, in order."""
    included: list[Piece] = []
    notes: list[str] = []
    left = limit
    for piece in pieces:
        size = len(piece.data)
        if size <= left:
            included.append(piece)
            left -= size
        elif piece.is_whole or left < 1024:
            notes.append(f"{piece.name}: {size} bytes were omitted")
        else:
            included.append(piece._replace(data=piece.data[-left:]))
            notes.append(f"{piece.name}: the last {left} of {size} bytes")
            left = 0
    return Fitted(tuple(included), tuple(notes))


def bundle(summary: dict[str, Any], pieces: Sequence[Piece], limit: int) -> tuple[Piece, ...]:
    """The files of a bundle. The first is the summary, which lists the files without room."""
    fitted = fit(pieces, max(0, limit - _SUMMARY_ROOM))
    files = {piece.name: len(piece.data) for piece in fitted.pieces}
    fields = {"version": VERSION, **summary, "files": files, "left_out": list(fitted.left_out)}
    text = json.dumps(fields, indent=2).encode()
    if len(text) > min(limit, _SUMMARY_ROOM):
        text = json.dumps({"version": VERSION, "job": summary["job"], "left_out": ["the summary is too long"]}).encode()
    return Piece(SUMMARY, text), *fitted.pieces


# Sending to an operator

_decoder = msgspec.msgpack.Decoder(tuple[Piece, ...])


def encode_bundle(pieces: Sequence[Piece]) -> bytes:
    return deflated(msgspec.msgpack.encode(tuple(pieces)))


def decode_bundle(data: bytes) -> tuple[Piece, ...]:
    """Decode another node's bundle. Raises ValueError if the bytes are not a bundle, or it is too large."""
    pieces = decoded(_decoder, inflated(data, 2 * ON_DEMAND_LIMIT))
    names = {piece.name for piece in pieces}
    bad = next((name for name in names if not _NAME.fullmatch(name)), None)
    if bad is not None or len(pieces) > _MAX_FILES or len(names) < len(pieces):
        raise ValueError(f"it contains the invalid file name {bad!r}" if bad else "it contains too many files")
    return pieces


# Writing to disk


def safe_name(text: str, most: int = 100) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", text).lstrip(".-")[:most] or "_"


def write_bundle(parent: str, name: str, pieces: Sequence[Piece]) -> str:
    """Write the files to a new folder in `parent` (created if missing) and return its path. If `name` exists, add a
    number. Raises OSError on failure, and leaves nothing behind.
    """

    def fill(hidden: str) -> None:
        os.mkdir(hidden, 0o700)
        for piece in pieces:
            path = os.path.join(hidden, piece.name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            _write(path, piece.data)

    return _appear(parent, (f"{name}.{number}" if number else name for number in range(_MOST)), fill)


def write_index(parent: str, fields: dict[str, Any]) -> str:
    """Write the index over all nodes, next to any existing one, and return its path. Raises OSError."""
    text = json.dumps({"version": VERSION, **fields}, indent=2) + "\n"
    stem, end = os.path.splitext(INDEX)
    names = (f"{stem}-{number}{end}" if number > 1 else INDEX for number in range(1, _MOST))
    return _appear(parent, names, lambda hidden: _write(hidden, text.encode()))


_MOST = 10_000
"""Maximum number of folders or indexes with the same name."""


def _write(path: str, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)


def _appear(parent: str, names: Iterator[str], make: Callable[[str], None]) -> str:
    """Create a file or folder under a temporary name, and rename it to the first free one of `names`. Raises
    OSError.
    """
    os.makedirs(parent, exist_ok=True)
    hidden = os.path.join(parent, f".new.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        make(hidden)
        is_file = os.path.isfile(hidden)
        for path in (os.path.join(parent, entry) for entry in names):
            if os.path.lexists(path):
                continue
            try:
                if is_file:
                    _link(hidden, path)
                else:
                    os.rename(hidden, path)
            except OSError:  # another process took the name
                if not os.path.lexists(path):
                    raise
                continue
            return path
        raise OSError(f"{parent} contains too many incidents")
    finally:
        if os.path.isfile(hidden):
            os.unlink(hidden)
        rmtree(hidden, ignore_errors=True)


def _link(new: str, path: str) -> None:
    try:
        os.link(new, path)
    except FileExistsError:
        raise
    except OSError:  # the file system has no links
        os.rename(new, path)


# Reading a folder


class IncidentSummary(NamedTuple):
    """One node's record of one failure. `at` is in seconds since 1970, on that node's clock."""

    job: str
    round: int
    at: float
    why: str
    headline: str
    host: str
    pid: int
    group_rank: int
    ranks: tuple[int, ...]
    folder: str


class IncidentList(NamedTuple):
    """The bundles that were found, oldest first, and sentences about unreadable ones."""

    found: tuple[IncidentSummary, ...]
    notes: tuple[str, ...]


def read_incidents(paths: Iterable[str]) -> IncidentList:
    incidents: list[IncidentSummary] = []
    notes: list[str] = []
    for path in _summaries(paths):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                incidents.append(_incident(json.loads(file.read(_MAX_SUMMARY)), os.path.dirname(path)))
        except OSError as error:
            notes.append(f"{path} cannot be read: {error.strerror}")
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            notes.append(f"{path} is not an incident summary that this version can read")
        if len(incidents) >= _MAX_BUNDLES:
            notes.append(f"there are more than {_MAX_BUNDLES} incidents; the rest are omitted")
            break
    return IncidentList(tuple(sorted(incidents, key=lambda incident: (incident.at, incident.group_rank))), tuple(notes))


def incident_lines(incidents: Sequence[IncidentSummary]) -> list[str]:
    """List each incident once, with its cause and the nodes that have a bundle."""
    groups: dict[tuple[str, int, str], list[IncidentSummary]] = {}
    for incident in incidents:
        groups.setdefault((incident.job, incident.round, os.path.dirname(incident.folder)), []).append(incident)
    lines: list[str] = []
    for (job, round_, folder), nodes in groups.items():
        first = next((node for node in nodes if node.headline), nodes[0])
        lines.append(f"job {job}, round {round_}: {first.why}{f': {first.headline}' if first.headline else ''}")
        lines.append(f"    {len(nodes)} node{'' if len(nodes) == 1 else 's'} in {printable(folder, 400)}")
    return lines


def incidents_json(incidents: IncidentList) -> str:
    rows = [incident._asdict() for incident in incidents.found]
    return json.dumps({"version": VERSION, "incidents": rows, "notes": incidents.notes}, indent=2)


def _summaries(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        if os.path.isfile(path) and os.path.basename(path) == SUMMARY:
            yield path
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if SUMMARY in files:
                folders.clear()
                yield os.path.join(folder, SUMMARY)


def _incident(fields: dict[str, Any], folder: str) -> IncidentSummary:
    if fields["version"] != VERSION:
        raise ValueError("it has a different version")
    node = fields["node"]
    return IncidentSummary(
        job=printable(str(fields["job"]), 200),
        round=int(fields["round"]),
        at=float(fields["at"]),
        why=printable(str(fields["why"]), 200),
        headline=printable(str(fields["headline"]), 1000),
        host=printable(str(node["host"]), 255),
        pid=int(node["pid"]),
        group_rank=int(node["group_rank"]),
        ranks=tuple(int(rank) for rank in node["ranks"]),
        folder=folder,
    )
