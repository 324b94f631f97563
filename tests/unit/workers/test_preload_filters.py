"""Which loops over all variables keep few of them, and which may keep any."""

from __future__ import annotations

import importlib
import types
from pathlib import Path

import pytest

from rallypoint.workers.preload.environ_recorder import EnvironRecorder
from rallypoint.workers.preload.loop_filters import KNOWN

BODY = "import os\nPREFIX = 'P_'\ndef read(prefix='X_', kept={}):\n"


def lines(*each: str) -> str:
    """The body of the function."""
    return "".join(f"    {line}\n" for line in each)


FOR = "for k in os.environ:"
IF, KEEP = "    if k.startswith('A'):", "        kept[k] = 1"

FILTERS = {
    lines("return {k: v for k, v in os.environ.items() if k.startswith(PREFIX)}"): {"P_"},
    lines("return [k for k in os.environ if k.startswith(prefix) and k not in kept]"): {"X_"},
    lines("return {k for k in os.environ.keys() if k.startswith((prefix, 'Y_'))}"): {"X_", "Y_"},
    lines("return dict((k[2:], v)", "    for k, v in os.environ.items()", "    if k.startswith(f'{prefix}Z'))"): {
        "X_Z"
    },
    lines("return [k for k in sorted(os.environ) if k.startswith('A') or k.startswith('B')]"): {"A", "B"},
    lines("return {k: v for k, v in dict(os.environ).items() if k.startswith(prefix)}"): {"X_"},
    lines("return {k: v for k, v in os.environ.copy().items() if k.startswith(prefix)}"): {"X_"},
    lines("return {k: v for k, v in os.environb.items() if k.startswith(b'C')}"): {"C"},
    lines("return any(k.startswith('A') or k.startswith('B') for k in os.environ)"): {"A", "B"},
    lines("for k, v in os.environ.items():", "    if k.startswith(PREFIX + prefix):", "        kept[k] = v"): {"P_X_"},
    lines(FOR, "    if not k.startswith('A'):", "        continue", "    kept[k] = os.environ[k]"): {"A"},
    lines(FOR, "    if k.startswith('A') and kept:", KEEP, "    elif k.startswith('B'):", KEEP): {"A", "B"},
    lines(FOR, IF, KEEP, "for k in kept:", "    str(k)"): {"A"},
    lines("for p in ('A', 'B'):", "    kept.update((k, 1) for k in os.environ if k.startswith(p))"): {"A", "B"},
}

KEEPING = [
    lines("return dict(os.environ)"),
    lines("return {**os.environ}"),
    lines("return os.environ.copy()"),
    lines("return list(os.environ.values())"),
    lines("return os.environ | {}"),
    lines("return [k for k in os.environ]"),
    lines("return len([k for k in os.environ if not k.startswith('A')])"),
    lines("return [k for k in os.environ if k.lower().startswith('a')]"),
    lines("return [k for k in os.environ if k.startswith('A') or kept.get(k)]"),
    lines("return [k for k in os.environ if k.startswith('A', 1)]"),
    lines("return [k for k in os.environ if k.startswith(kept.get('none', 'A'))]"),
    lines("return [v for k, v in os.environ.items() if v.startswith('A')]"),
    lines("return [k for k in sorted(os.environ, key=kept.get) if k.startswith('A')]"),
    lines("return {k: list(os.environ) for k in ['A'] if k.startswith('A')}"),
    lines("return [k for p in ('A', 'B') for k in os.environ if k.startswith(p)]"),
    lines("return (lambda any: any(k.startswith('A') for k in os.environ))(list)"),
    lines(FOR, IF, KEEP, "    else:", KEEP),
    lines(FOR, IF, KEEP, "    kept[1] = k"),
    lines(FOR, "    kept[1] = k", IF, KEEP),
    lines(FOR, IF, KEEP, "return k"),
    lines(FOR, IF, KEEP, "return locals()"),
    lines(FOR, IF, KEEP, "return (lambda: k)"),
    lines(FOR, IF, KEEP, "else:", "    kept[1] = k"),
    lines("global k", FOR, IF, KEEP),
    lines(FOR, "    if k.startswith(prefix):", "        prefix = ''"),
    lines("class Left:", f"    {FOR}", f"    {IF}", "            pass"),
    lines("exec(compile('[k for k in os.environ if k.startswith(PREFIX)]', '<nowhere>', 'eval'), globals())"),
]


class Refused(Exception):
    """Something read what it must not."""


def recorded(folder: Path, text: str, own: tuple[str, ...] = ()) -> EnvironRecorder:
    path = folder / "reader.py"
    path.write_text(text)

    def refuse(where: str, what: str) -> None:
        raise Refused(f"{where} {what}")

    module = types.ModuleType("reader")
    code = compile(text, str(path), "exec")
    with EnvironRecorder(own, refuse) as recording:
        exec(code, module.__dict__)
    return recording


@pytest.mark.parametrize("body", FILTERS)
def test_what_is_a_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("P_X_A", "0")
    recording = recorded(tmp_path, f"{BODY}{body}read()\n", own=("RANK",))
    assert set(recording.prefixes) == FILTERS[body]
    assert all(where.startswith(f"{tmp_path}/reader.py:") for where in recording.prefixes.values())


@pytest.mark.parametrize("body", KEEPING)
def test_what_may_keep_any(tmp_path: Path, body: str) -> None:
    with pytest.raises(Refused, match=r"reader.py:\d+ copies all environment variables$|<nowhere>:1 copies all"):
        recorded(tmp_path, f"{BODY}{body}read()\n")


def test_a_loop_of_a_module_leaves_its_last_variable_there(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"reader.py:2 copies all"):
        recorded(tmp_path, "import os\nfor k in os.environ:\n    if k.startswith('A'):\n        pass\n")


def test_what_a_filter_keeps_may_be_of_a_worker(tmp_path: Path) -> None:
    text = "import os\nHOST = [k for k in os.environ if k.startswith('MASTER_')]\n"
    with pytest.raises(Refused, match=r"reader.py:2 reads all .* begin with 'MASTER_', as MASTER_ADDR does$"):
        recorded(tmp_path, text, own=("RANK", "MASTER_PORT", "MASTER_ADDR"))


@pytest.mark.parametrize(
    "text", ["os.environ.get('RANK')", "os.getenv('RANK')", "'RANK' in os.environ", "os.environ.setdefault('RANK', '')"]
)
def test_who_has_read_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RANK", "0")
    assert recorded(tmp_path, f"import os\n\n{text}\n").read == {"RANK": f"{tmp_path}/reader.py:3"}
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Refused, match=r"^reader.py:3 reads RANK$"):
        recorded(tmp_path, f"import os\n\n{text}\n", own=("RANK",))


def test_a_loop_has_not_read_each_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P_A", "0")
    text = f"{BODY}    return {{k: v for k, v in os.environ.items() if k.startswith(PREFIX)}}\nkept = read()\n"
    assert recorded(tmp_path, text).read == {}


KNOWN_READERS = {
    ("fsspec.config", "set_conf_env"): "read({})",
    ("subprocess", "_execute_child"): "import os; module.Popen(['true'], env=os.environ).wait()",
    ("ctypes.util", "_findLib_gcc"): "read('of_no_such_name')",
    ("uuid", "_get_command_stdout"): "read('true', '')",
    ("urllib.request", "getproxies_environment"): "read()",
}


def test_each_known_reader_is_called_here() -> None:
    assert KNOWN_READERS.keys() == KNOWN.keys()


@pytest.mark.parametrize("reader", KNOWN_READERS, ids=".".join)
@pytest.mark.process
def test_known_readers(reader: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are what they were when they were looked at; without the table they would be refused."""
    for program in ("gcc", "true"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    module = importlib.import_module(reader[0])
    scope = {"module": module, "read": getattr(module, reader[1], None)}
    with EnvironRecorder((), lambda where, what: pytest.fail(f"{where} {what}")) as recording:
        exec(KNOWN_READERS[reader], scope)
    assert set(recording.prefixes) == set(KNOWN[reader])
    monkeypatch.delitem(KNOWN, reader)
    refused: list[str] = []
    with EnvironRecorder((), lambda where, what: refused.append(what)):
        exec(KNOWN_READERS[reader], scope)
    assert set(refused) == {"copies all environment variables"}


def test_what_fsspec_keeps() -> None:
    kept: dict[str, object] = {}
    read = importlib.import_module("fsspec.config").set_conf_env
    read(kept, {"FSSPEC_A": '{"a": 1}', "FSSPEC_B_C": "x", "RANK": "1", "OTHER": "{}"})
    assert kept == {"a": {"a": 1}, "b": {"c": "x"}}
