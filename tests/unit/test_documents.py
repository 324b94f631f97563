"""Links, citations and names in the documents are correct."""

from __future__ import annotations

import ast
import json
import keyword
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from benchmarks import chart, figures
from docs.file_names import with_file_names
from docs.generate import GENERATED, REFERENCE

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "rallypoint"

NAMING = ("docs/architecture.md", "docs/glossary.md", "CONTRIBUTING.md")
"""The pages whose every `path` and `name` has to be there."""

ELSEWHERE = frozenset({"train.py", "iproute2", "c10d"})
"""A reader's file, a program, and a backend: names that no file of ours defines."""

OTHERS = frozenset({*sys.stdlib_module_names, "torch", "__main__"})
"""Packages of others, whose names are theirs to keep."""

OF_OTHERS = frozenset({"SSLObject.getpeercert", "memory.events", "memory.oom_control", "notice.json"})
OF_OTHERS |= {"latest_checkpointed_iteration.txt"}
"""Dotted names in docstrings that are the standard library's, or of files."""

PLACEHOLDERS = frozenset({"Class.method", "rallypoint.compat.X"})


def test_links_between_documents_lead_somewhere() -> None:
    folders = ("docs", "benchmarks", "deploy")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if not re.match(r"[a-z]+:", link)
    ]
    assert len(links) > 50
    targets = {(page, link): (page.parent / link).resolve() for page, link in links}
    missing = [each for each, target in targets.items() if not target.exists()]
    assert [f"{page.relative_to(ROOT)}: {link}" for page, link in missing] == []


@pytest.mark.parametrize("name", figures.TABLES)
def test_documents_have_the_figures_of_the_last_run(name: str) -> None:
    """Renew them with `python -m benchmarks.figures`, if a run of everything has not done so."""
    document = ROOT / figures.TABLES[name][0]
    assert figures.block(name, json.loads(chart.PATH.with_suffix(".json").read_text())) in document.read_text()


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_pages_match_the_code(name: str) -> None:
    """Renew them with `python -m docs.generate`."""
    assert (GENERATED / f"{name}.md").read_text() == REFERENCE[name]()


def test_the_readme_has_the_chart_of_the_last_run() -> None:
    assert f"docs/{chart.PATH.name}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", NAMING)
def test_files_and_names_that_a_page_mentions_are_there(page: str) -> None:
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())
    in_tests = [_defined_in(each) for each in quoted if re.fullmatch(r"tests/[\w/]+\.py", each)]
    assert [each for each in quoted if not _is_there(each) and not any(each in names for names in in_tests)] == []


@pytest.mark.parametrize("page", NAMING)
def test_a_name_that_stands_beside_a_file_is_in_it(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    pairs = re.findall(r"`([\w/]+\.py)`, `([A-Za-z_][\w.]*)`", text)
    pairs += [(file, name) for name, file in re.findall(r"`([A-Za-z_][\w.]*)` \(`([\w/]+\.py)`[,)]", text)]
    assert [(file, name) for file, name in pairs if not set(name.split(".")) <= _defined_in(file)] == []


def test_dotted_names_in_docstrings_are_there() -> None:
    found = [(path.relative_to(SOURCE), name) for path, tree in _trees() for name in _dotted_names(tree)]
    assert len(found) > 100
    assert [f"{path}: {name}" for path, name in found if not _is_dotted_name(name)] == []


def test_sections_that_a_page_links_to_are_there() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").glob("*.md")]
    for path in pages:
        if path.parent.name in ("generated", "project"):  # the build of the site checks these
            continue
        links = re.findall(r"\]\(((?!\w+:)[^)#\s]*)#([^)]+)\)", path.read_text())
        assert [
            each for each in links if each[1] not in _headings((path.parent / each[0]) if each[0] else path)
        ] == [], path


@cache
def _headings(page: Path) -> frozenset[str]:
    """The sections of a page, as a link names them."""
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


def test_files_that_a_package_lists_are_there() -> None:
    for init in [*SOURCE.rglob("__init__.py"), *(ROOT / "tests").rglob("__init__.py")]:
        listed = re.findall(r"^(?:    )?(\w+/?)  +\S", ast.get_docstring(ast.parse(init.read_text())) or "", re.M)
        there = {path.stem for path in init.parent.iterdir()}
        assert [name for name in listed if name.rstrip("/") not in there] == [], init.relative_to(ROOT)


def test_the_table_of_packages_has_the_layers_that_are_held() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["type"] == "layers")
    held = {name: number for number, row in enumerate(reversed(layers)) for name in row.split(" | ")}
    rows = re.findall(r"^\| (\d+) \| `(\w+)(?:/|\.py)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert {name: int(number) for number, name in rows} == held
    assert len(rows) == len(held), "each package once"


def _is_there(quoted: str) -> bool:
    """Whether what stands between backquotes is a file or a name of ours, or nothing that claims to be one."""
    if quoted in ELSEWHERE or re.search(r"[\s=<>:]|^[-/]", quoted):  # a command, a flag, an address
        return True
    if "/" in quoted or quoted.endswith((".py", ".md", ".toml")):
        return any(any(base.glob(quoted.rstrip("/"))) for base in (SOURCE, ROOT))
    if re.fullmatch(r"[A-Za-z_][\w.]*", quoted):
        *owner, name = quoted.split(".")
        return keyword.iskeyword(name) or quoted in _names() or (bool(owner) and name in _members().get(owner[-1], ()))
    return True


def _dotted_names(tree: ast.Module) -> list[str]:
    """Each `Class.attribute` and `module.name` of the docstrings of a module."""
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    texts = [each.value for each in strings if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return [name for text in texts for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)`", text)]


def _is_dotted_name(quoted: str) -> bool:
    """Whether each part of a dotted name is defined by the one before: a package, a module, a class, or a variable."""
    first, *rest = quoted.split(".")
    if first in OTHERS or quoted in OF_OTHERS or quoted in PLACEHOLDERS or quoted in _names():
        return True
    owners = [first, *rest[:-1]]
    if any(owner in _members() for owner in owners):
        return all(name in _members().get(owner, ()) for owner, name in zip(owners, rest, strict=True))
    return first.islower() and first in _names()  # a variable: what it has is not known here


@cache
def _members() -> dict[str, set[str]]:
    """Packages to what lies in them, modules and classes to what they define, those of one name together."""
    members: dict[str, set[str]] = {}
    for path, tree in _trees():
        owner = path.parent if path.stem == "__init__" else path
        members.setdefault(path.parent.name, set()).add(path.stem)
        members.setdefault(owner.parent.name, set()).add(owner.stem)
        members.setdefault(owner.stem, set()).update(_defined(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                members.setdefault(node.name, set()).update(_defined(node), _assigned_to_self(node))
    return members


def _assigned_to_self(tree: ast.AST) -> set[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self"}


@cache
def _trees() -> list[tuple[Path, ast.Module]]:
    """The modules of the source: path and syntax tree."""
    return [(path, ast.parse(path.read_text())) for path in SOURCE.rglob("*.py")]


@cache
def _names() -> set[str]:
    """Modules, packages and definitions of the source, and the words of the files that say what it is built with."""
    names = {path.stem for path in SOURCE.rglob("*")} | {"rallypoint"}
    for _, tree in _trees():
        names |= _defined(tree)
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=imported):
                    names.update(each.name for each in imported)
                case ast.ImportFrom(module=str(module), names=imported):
                    names.update({module, *(f"{module}.{each.name}" for each in imported)})
                case ast.arg(arg=name):
                    names.add(name)
                case ast.Constant(value=str(text)) if re.fullmatch(r"[A-Z]\w*|[a-z]+\.[a-z_]+", text):
                    names.add(text)  # an environment variable, or a group of entry points
    for file in ("pyproject.toml", "Makefile"):
        names.update(re.findall(r"[\w.]+", (ROOT / file).read_text()))
    return names


def _defined_in(file: str) -> set[str]:
    base = next(each for each in (SOURCE, ROOT) if (each / file).exists())
    return _defined(ast.parse((base / file).read_text()))


def _defined(tree: ast.AST) -> set[str]:
    """Classes, functions and variables that are defined anywhere in it."""
    names = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


# Each section of the contract that code, tests or pages cite is a heading in `docs/contract/`

PAGES = ROOT / "docs" / "contract"

_NUMBER = r"\d+(?:\.\d+)?"
_NUMBERS = rf"{_NUMBER}(?:(?:, | and | to ){_NUMBER})*"
_CITATION = re.compile(
    rf"\b[Cc]ontract(?:'s)?(?: tables)? \(?(?:sections? )?({_NUMBERS})"
    rf"|\b[Ss]ections? ({_NUMBERS}) of the (?:\w+ )?contract"
)
"""`contract section 4.6`, `contract's sections 1 and 7.6`, `contract 5.10`, `section 4.3 of the contract`."""


def cited(text: str) -> Iterator[str]:
    """The sections that `text` cites, ends of lines and the marks of comments counted as spaces."""
    for found in _CITATION.finditer(re.sub(r"\s*\n[\s#*/]*", " ", text)):
        numbers = found[1] or found[2]
        yield from re.findall(_NUMBER, numbers)


def test_every_section_that_is_cited_exists() -> None:
    headings = [
        found[1]
        for page in sorted(PAGES.glob("[01]*.md"))
        for found in re.finditer(rf"(?m)^##? ({_NUMBER})\.? ", page.read_text())
    ]
    assert len(headings) == len(set(headings))
    files = [
        path
        for folder, suffixes in {
            "src": (".py", ".c", ".h"),
            "tests": (".py",),
            "docs": (".md",),
            "benchmarks": (".py", ".md"),
        }.items()
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes and path != Path(__file__)
    ]
    citations = [(number, str(path.relative_to(ROOT))) for path in files for number in cited(path.read_text())]
    assert len(citations) > 100  # or the pattern has lost them
    assert [citation for citation in citations if citation[0] not in headings] == []


def test_the_cases_beside_torchrun_begin_with_a_section() -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests/conformance/side_by_side").glob("cases_*.py"))
    pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
    sections = set(re.findall(rf'Case\(\s*"({_NUMBER}) ', text))
    assert sections
    assert [section for section in sections if not re.search(rf"(?m)^##? {section}\.? ", pages)] == []


# Blocks that stand for a file are named on the site


def test_a_file_has_its_name_above_it() -> None:
    page = "Save this:\n\n<!-- file: train.py -->\n```python\nprint(1)\n```\n"
    assert with_file_names(page) == "Save this:\n\n```{code-block} python\n:caption: train.py\n\nprint(1)\n```\n"


def test_other_comments_and_blocks_stay() -> None:
    page = "<!-- file: a b.sh -->\n<!-- not run: no -->\n```bash\nls\n```\n\n<!-- exit: 1 -->\n```console\n$ ls\n```\n"
    named = with_file_names(page)
    assert named.startswith("<!-- not run: no -->\n```{code-block} bash\n:caption: a b.sh\n\nls\n```\n")
    assert named.endswith("<!-- exit: 1 -->\n```console\n$ ls\n```\n")
