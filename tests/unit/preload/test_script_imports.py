"""The imports that `--preload=auto` reads from scripts."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.features.preload.imports import MAX_FILES, Reader, in_a_copy, installed_imports

TRAINING = Path(__file__).parents[3] / "examples" / "train_ddp.py"

READ = {
    "import a, b.c as d\nfrom e import f, g as h\nfrom i import *": "a b.c e:f,g i",
    "if x:\n import a\nelif y:\n import b\nelse:\n import c": "a b c",
    "try:\n import a\nexcept ImportError:\n import b\nelse:\n import c\nfinally:\n import d": "a b c d",
    "with x:\n import a\nfor y in z:\n import b\nwhile True:\n import c\nclass C:\n import d": "a b c d",
    "match x:\n case 1:\n  import a\nasync def f(): import b\nf": "a b",
    "if TYPE_CHECKING:\n import a\nelse:\n import b": "b",
    "import typing\nif typing.TYPE_CHECKING:\n import a": "typing",
    "if 0:\n import a\nif True:\n import b\nelse:\n import c": "b",
    "def f(): import a": "",
    "def f(): import a\nf()": "a",
    "f()\ndef f(): g\ndef g(): import a": "a",
    "if __name__ == '__main__':\n main()\ndef main(): import a": "a",
    "@app.command()\ndef f(): import a": "a",
    "def f(x=g()): import a\ndef g(): import b": "b",
    "class C:\n def __init__(self): import a\n def f(self): import b\n def g(self): import c": "",
    "class C:\n def __init__(self): import a\n def f(self): import b\n def g(self): import c\nC().f()": "a b",
    "(lambda: f())()\ndef f(): import a": "a",
    "from . import a\nfrom ..x import y": "",
    "def __getattr__(name): import a": "",
    "": "",
}


def shown(found: list[tuple[str, list[str]]]) -> str:
    return " ".join(f"{module}:{','.join(names)}" if names else module for module, names in found)


@pytest.mark.parametrize(("text", "wanted"), READ.items(), ids=range(len(READ)))
def test_imports_of_a_source(text: str, wanted: str) -> None:
    assert shown(Reader().read(text.encode())) == wanted


def test_sources_in_packages_and_after_others() -> None:
    text = b"from . import a\nfrom .b import c\nfrom ..d import e\nfrom ... import f\nfrom .... import g"
    assert shown(Reader().read(text, "x.y.z")) == "x.y.z:a x.y.z.b:c x.y.d:e x:f"
    reader = Reader()
    assert reader.read(b"def run(): import a") == []
    assert shown(reader.read(b"import trainer\ntrainer.run()")) == "trainer a", "a later file names the function"
    assert shown(reader.read(b"def run(): import b")) == "b"


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_any_text(text: str) -> None:
    try:
        Reader().read(text.encode())
    except (SyntaxError, ValueError):
        return


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], str]:
    """Writes files, installed ones below site-packages; returns the path of `train.py`."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "site-packages"), *sys.path])

    def write(files: dict[str, str]) -> str:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return str(tmp_path / "train.py")

    return write


Project = Callable[[dict[str, str]], str]


def found(target: str, *known: str, is_module: bool = False) -> str:
    return shown(installed_imports(target, is_module, known))


def test_installed_modules_and_the_users_own(project: Project) -> None:
    script = project(
        {
            "train.py": "import json, dist.part, mine.data, helper, nowhere, sys\nfrom dist import thing",
            "helper.py": "import decimal\nimport mine.data",
            "mine/__init__.py": "import colorsys",
            "mine/data.py": "from . import more\nfrom .. import beyond\nimport dist2",
            "mine/more.py": "import fractions\nimport helper",
            "site-packages/dist/__init__.py": "import csv",
            "site-packages/dist/part.py": "import wave",
            "site-packages/dist2.py": "",
        }
    )
    assert found(script) == "json dist.part sys dist:thing colorsys dist2 decimal fractions"


def test_known_packages_count_as_installed_and_nothing_is_executed(project: Project) -> None:
    script = project({"train.py": "import torch.nn", "torch/__init__.py": "import csv", "torch/nn.py": "import wave"})
    assert found(script) == "csv wave"
    assert found(script, "torch") == "torch.nn"
    script = project({"train.py": "import helper\n1 / 0", "helper.py": "import json\nraise SystemExit(3)"})
    before = set(sys.modules)
    assert found(script) == "json"
    assert "helper" not in {*sys.modules} - before, "nothing is executed"


def test_modules_folders_and_namespace_packages(project: Project, tmp_path: Path) -> None:
    project(
        {
            "package/__init__.py": "import csv",
            "package/__main__.py": "from . import other",
            "package/other.py": "import wave",
            "spaces/of/names.py": "import package.other",
        }
    )
    assert found("package", is_module=True) == "csv wave"
    assert found("package.other", is_module=True) == "csv wave"
    assert found("spaces.of.names", is_module=True) == "csv wave"
    assert found(str(tmp_path / "package")) == "", "as a folder, it is in no package"


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "why"), [("1 +\n", "SyntaxError"), ("\0", "null bytes"), ("#" * (1 << 20) + "\n", "longer than")]
)
def test_unreadable_scripts_are_errors_and_unreadable_modules_are_not(project: Project, text: str, why: str) -> None:
    script = project({"train.py": "import broken, json\n", "broken.py": text})
    assert found(script) == "json"
    script = project({"train.py": text})
    with pytest.raises(ValueError, match=why):
        in_a_copy(lambda: installed_imports(script, False))
    for missing, is_module in ((f"{script}.none", False), ("no.such.module", True)):
        with pytest.raises((OSError, ValueError)):
            installed_imports(missing, is_module)


def test_the_number_of_files_is_limited(project: Project) -> None:
    files = {f"m{at}.py": f"import m{at + 1}\n" for at in range(MAX_FILES + 50)}
    files[f"m{MAX_FILES - 2}.py"] += "import json"
    files[f"m{MAX_FILES - 1}.py"] += "import wave"
    assert found(project({"train.py": "import m0", **files})) == "json"


@pytest.mark.process
def test_in_a_copy() -> None:
    with pytest.raises(ValueError, match="has exited"):
        in_a_copy(lambda: os._exit(3))
    assert in_a_copy(lambda: [("a", ["b"])]) == [("a", ["b"])]


def test_imports_of_the_training_example() -> None:
    imported = [module for module, _ in installed_imports(str(TRAINING), False, ["torch"])]
    if any(module.startswith("torch") for module in imported):  # where it is installed
        assert {"torch", "torch.distributed", "torch.nn.parallel", "torch.nn.functional"} <= {*imported}
    assert {"argparse", "json"} <= {*imported}
