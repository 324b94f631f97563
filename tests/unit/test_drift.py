"""`make drift` reads torch's syntax, reports differences between two versions, and finds them in the contract."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.drift import compare
from tests.drift.compare import Line, changes
from tests.drift.theirs import facts, read

FILES = {
    "torch/version.py": "__version__ = '3.1.0+cu140'\n",
    "torch/distributed/run.py": """
from torch.distributed.argparse_util import check_env, env
def get_args_parser():
    parser = ArgumentParser(description="no such torch")
    parser.add_argument("--one", "--o_ne", action=env, type=int, default=3, help="a" "b")
    parser.add_argument("-s", "--switch", action=check_env, help="c")
    return parser
def _hidden(): ...
""",
    "torch/distributed/launch.py": "",
    "torch/distributed/launcher/__init__.py": "from .api import Config, launch\n",
    "torch/distributed/launcher/api.py": """
__all__ = ["Config", "launch", "KEY", "Mode"]
KEY = "key"
class Mode(Enum):
    A = "a"
@dataclass
class Config:
    nodes: int
    role: str = KEY
    made: ClassVar[int] = 3
    more: dict = field(init=False)
    def show(self, wide=False): ...
    def _secret(self): ...
def launch(config, *args, timeout=compute(), **more):
    os.environ.get("A_VARIABLE")
    return os.environ["ANOTHER"] if KEY in os.environ else None
""",
    "torch/distributed/elastic/agent/server/local_elastic_agent.py": """
worker_env = {"RANK": 1}
worker_env["LOCAL_RANK"] = 2
""",
    "torch/distributed/elastic/multiprocessing/api.py": "FILE = f'{x}/' + 'stdout.log'\nenvs[0]['ERROR'] = FILE\n",
    "torch/distributed/elastic/multiprocessing/errors/error_handler.py": "data = {'message': data['timestamp']}\n",
    "torch/distributed/elastic/rendezvous/dynamic.py": "params.get_as_int('keep', 5), _get_timeout(params, 'join')\n",
    "torch-3.1.0.dist-info/entry_points.txt": "[console_scripts]\ntorchrun = torch.distributed.run:main\n",
}
HELP = {f"help of --{name}" for name in ("one", "switch")}
EXPECTED = {
    "flag --one": "--one --o_ne int 3 () True",
    "flag --switch": "-s --switch switch - () True",
    "name distributed.launcher.Config": "same",
    "name distributed.launcher.launch": "same",
    "name distributed.launcher.api.Config": "class",
    "name distributed.launcher.api.Config(nodes)": "0",
    "name distributed.launcher.api.Config(role)": "1='key'",
    "name distributed.launcher.api.Config.made": "constant",
    "name distributed.launcher.api.Config.more": "constant",
    "name distributed.launcher.api.Config.nodes": "constant",
    "name distributed.launcher.api.Config.role": "constant",
    "name distributed.launcher.api.Config.show": "function",
    "name distributed.launcher.api.Config.show(wide)": "0=False",
    "name distributed.launcher.api.KEY": "'key'",
    "name distributed.launcher.api.Mode": "class",
    "name distributed.launcher.api.Mode.A": "constant",
    "name distributed.launcher.api.launch": "function",
    "name distributed.launcher.api.launch(config)": "0",
    "name distributed.launcher.api.launch(args)": "1",
    "name distributed.launcher.api.launch(timeout)": "2=(computed)",
    "name distributed.launcher.api.launch(more)": "3",
    "name distributed.run.get_args_parser": "function",
    "name distributed.elastic.multiprocessing.api.FILE": "constant",
    "name distributed.elastic.multiprocessing.errors.error_handler.data": "constant",
    "name distributed.elastic.agent.server.local_elastic_agent.worker_env": "constant",
    **dict.fromkeys(["variable A_VARIABLE", "variable ANOTHER", "variable key"], ""),
    **dict.fromkeys(["worker variable RANK", "worker variable LOCAL_RANK", "worker variable ERROR"], ""),
    **dict.fromkeys(["option keep", "option join_timeout", "file stdout.log"], ""),
    **dict.fromkeys(["member of the error file message", "member of the error file timestamp"], ""),
    "entry point console_scripts: torchrun = torch.distributed.run:main": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_reading_torch(folder: Path) -> None:
    found = read(folder)
    assert found.version == "3.1.0"
    assert {fact: text for fact, text in facts(found).items() if fact not in HELP} == EXPECTED
    assert facts(found).keys() >= HELP
    with zipfile.ZipFile(folder / "torch.whl", "w") as wheel:
        for name in FILES:
            wheel.write(folder / name, name)
    assert read(folder / "torch.whl") == found
    (folder / "torch/distributed/run.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no torch/distributed/run\.py; give a wheel"):
        read(folder)


def test_changes() -> None:
    old = {
        "flag --a": "x",
        "help of --a": "1",
        "help of --b": "1",
        "name m.C": "class",
        "name m.C(x)": "0",
        "file f": "",
    }
    new = {"flag --c": "x", "help of --c": "1", "help of --b": "2", "name m.C": "class", "name m.D": "class"}
    new |= {"name m.D(y)": "0", "name m.D.z": "function"}
    assert sorted(changes(old, new)) == [
        Line("changed", "help of --b", "another text"),
        Line("gone", "file f"),
        Line("gone", "flag --a"),
        Line("gone", "name m.C(x)"),
        Line("new", "flag --c"),
        Line("new", "name m.D"),
    ]


def test_explanations_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "SINCE", {"option new_key: ": "2.15"})
    monkeypatch.setattr(compare, "EXPLAINED", {"flag --odd: .*": "a row"})
    since = compare._place(Line("gone", "option new_key"), "2.13.0")
    assert since.startswith("docs/contract/README.md: since torch 2.15")
    for kind, name, torch in (("new", "other", "2.13.0"), ("gone", "new_key", "2.15.0"), ("new", "new_key", "2.13.0")):
        assert compare._place(Line(kind, f"option {name}"), torch) == ""
    assert compare._place(Line("changed", "flag --odd", "default"), "2.13.0") == "in the differences: a row"
    assert "NOWHERE" in str(Line("new", "option other"))
