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
"""Pages whose every `path` and `name` must exist."""

ELSEWHERE = frozenset({"train.py", "iproute2", "c10d"})
"""A reader's file, a program, and a backend."""

OTHERS = frozenset({*sys.stdlib_module_names, "torch", "__main__"})
"""Other packages."""

OF_OTHERS = frozenset({"SSLObject.getpeercert", "memory.events", "memory.oom_control", "notice.json"})
OF_OTHERS |= {"latest_checkpointed_iteration.txt"}
"""Dotted names of the standard library and of files."""

PLACEHOLDERS = frozenset({"Class.method", "rallypoint.compat.X"})


def test_links() -> None:
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
    missing = [key for key, target in targets.items() if not target.exists()]
    assert [f"{page.relative_to(ROOT)}: {link}" for page, link in missing] == []


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_pages_match_the_code(name: str) -> None:
    """Update them with `python -m docs.generate`."""
    assert (GENERATED / f"{name}.md").read_text() == REFERENCE[name]()


@pytest.mark.parametrize("name", figures.TABLES)
def test_figures(name: str) -> None:
    """Update them with `python -m benchmarks.figures`."""
    document = ROOT / figures.TABLES[name][0]
    assert figures.block(name, json.loads(chart.PATH.with_suffix(".json").read_text())) in document.read_text()
    assert f"docs/{chart.PATH.name}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", NAMING)
def test_files_and_names_of_a_page_exist(page: str) -> None:
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())
    in_tests = [_defined_in(word) for word in quoted if re.fullmatch(r"tests/[\w/]+\.py", word)]
    assert [word for word in quoted if not _exists(word) and not any(word in names for names in in_tests)] == []


@pytest.mark.parametrize("page", NAMING)
def test_names_beside_a_file_are_in_it(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    pairs = re.findall(r"`([\w/]+\.py)`, `([A-Za-z_][\w.]*)`", text)
    pairs += [(file, name) for name, file in re.findall(r"`([A-Za-z_][\w.]*)` \(`([\w/]+\.py)`[,)]", text)]
    assert [(file, name) for file, name in pairs if not set(name.split(".")) <= _defined_in(file)] == []


def test_dotted_names_in_docstrings_exist() -> None:
    found = [(path.relative_to(SOURCE), name) for path, tree in _trees() for name in _dotted_names(tree)]
    assert len(found) > 100
    assert [f"{path}: {name}" for path, name in found if not _is_dotted_name(name)] == []


def test_links_to_sections() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").glob("*.md")]
    for path in pages:
        if path.parent.name in ("generated", "project"):  # the build of the site checks these
            continue
        links = re.findall(r"\]\(((?!\w+:)[^)#\s]*)#([^)]+)\)", path.read_text())
        missing = [link for link in links if link[1] not in _headings((path.parent / link[0]) if link[0] else path)]
        assert missing == [], path


@cache
def _headings(page: Path) -> frozenset[str]:
    """The anchors of a page."""
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


def test_files_listed_in_packages_exist() -> None:
    for init in [*SOURCE.rglob("__init__.py"), *(ROOT / "tests").rglob("__init__.py")]:
        listed = re.findall(r"^(?:    )?(\w+/?)  +\S", ast.get_docstring(ast.parse(init.read_text())) or "", re.M)
        present = {path.stem for path in init.parent.iterdir()}
        assert [name for name in listed if name.rstrip("/") not in present] == [], init.relative_to(ROOT)


def test_the_table_of_packages_matches_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    numbers = {name: number for number, row in enumerate(reversed(layers)) for name in row.split(" | ")}
    rows = re.findall(r"^\| (\d+) \| `(\w+)(?:/|\.py)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert sorted((name, int(number)) for number, name in rows) == sorted(numbers.items())


def _exists(quoted: str) -> bool:
    """Whether a quoted word is a file or name of ours, or neither a file nor a name."""
    if quoted in ELSEWHERE or re.search(r"[\s=<>:]|^[-/]", quoted):  # a command, a flag, an address
        return True
    if "/" in quoted or quoted.endswith((".py", ".md", ".toml")):
        return any(any(base.glob(quoted.rstrip("/"))) for base in (SOURCE, ROOT))
    if re.fullmatch(r"[A-Za-z_][\w.]*", quoted):
        *owner, name = quoted.split(".")
        return keyword.iskeyword(name) or quoted in _names() or (bool(owner) and name in _members().get(owner[-1], ()))
    return True


def _dotted_names(tree: ast.Module) -> list[str]:
    """Every `Class.attribute` and `module.name` in the docstrings of a module."""
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    texts = [text.value for text in strings if isinstance(text, ast.Constant) and isinstance(text.value, str)]
    return [name for text in texts for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)`", text)]


def _is_dotted_name(quoted: str) -> bool:
    """Whether each part of a dotted name is defined by the part before."""
    first, *rest = quoted.split(".")
    if first in OTHERS or quoted in OF_OTHERS or quoted in PLACEHOLDERS or quoted in _names():
        return True
    owners = [first, *rest[:-1]]
    if any(owner in _members() for owner in owners):
        return all(name in _members().get(owner, ()) for owner, name in zip(owners, rest, strict=True))
    return first.islower() and first in _names()  # a variable, whose attributes are unknown


@cache
def _members() -> dict[str, set[str]]:
    """The members of packages, modules and classes by name; those with the same name together."""
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
    """Modules, packages and definitions of the source, and the words of pyproject.toml and Makefile."""
    names = {path.stem for path in SOURCE.rglob("*")} | {"rallypoint"}
    for _, tree in _trees():
        names |= _defined(tree)
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=imported):
                    names.update(alias.name for alias in imported)
                case ast.ImportFrom(module=str(module), names=imported):
                    names.update({module, *(f"{module}.{alias.name}" for alias in imported)})
                case ast.arg(arg=name):
                    names.add(name)
                case ast.Constant(value=str(text)) if re.fullmatch(r"[A-Z]\w*|[a-z]+\.[a-z_]+", text):
                    names.add(text)  # an environment variable, or a group of entry points
    for file in ("pyproject.toml", "Makefile"):
        names.update(re.findall(r"[\w.]+", (ROOT / file).read_text()))
    return names


def _defined_in(file: str) -> set[str]:
    base = next(folder for folder in (SOURCE, ROOT) if (folder / file).exists())
    return _defined(ast.parse((base / file).read_text()))


def _defined(tree: ast.AST) -> set[str]:
    """All classes, functions and variables."""
    names = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


# Cited sections of the contract

PAGES = ROOT / "docs" / "contract"

_NUMBER = r"\d+(?:\.\d+)?"
_NUMBERS = rf"{_NUMBER}(?:(?:, | and | to ){_NUMBER})*"
_CITATION = re.compile(
    rf"\b[Cc]ontract(?:'s)?(?: tables)? \(?(?:sections? )?({_NUMBERS})"
    rf"|\b[Ss]ections? ({_NUMBERS}) of the (?:\w+ )?contract"
)
"""`contract section 4.6`, `contract's sections 1 and 7.6`, `contract 5.10`, `section 4.3 of the contract`."""


def cited(text: str) -> Iterator[str]:
    """The sections that `text` cites; newlines and comment characters count as spaces."""
    for found in _CITATION.finditer(re.sub(r"\s*\n[\s#*/]*", " ", text)):
        numbers = found[1] or found[2]
        yield from re.findall(_NUMBER, numbers)


def test_cited_sections_exist() -> None:
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
    assert len(citations) > 100  # or the pattern is wrong
    assert [citation for citation in citations if citation[0] not in headings] == []


def test_sections_of_side_by_side_cases_exist() -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests/conformance/side_by_side").glob("cases_*.py"))
    pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
    sections = set(re.findall(rf'Case\(\s*"({_NUMBER}) ', text))
    assert sections
    assert [section for section in sections if not re.search(rf"(?m)^##? {section}\.? ", pages)] == []


# File names of code blocks


def test_with_file_names() -> None:
    page = "Save this:\n\n<!-- file: train.py -->\n```python\nprint(1)\n```\n"
    assert with_file_names(page) == "Save this:\n\n```{code-block} python\n:caption: train.py\n\nprint(1)\n```\n"
    page = "<!-- file: a b.sh -->\n<!-- not run: no -->\n```bash\nls\n```\n\n<!-- exit: 1 -->\n```console\n$ ls\n```\n"
    named = with_file_names(page)
    assert named.startswith("<!-- not run: no -->\n```{code-block} bash\n:caption: a b.sh\n\nls\n```\n")
    assert named.endswith("<!-- exit: 1 -->\n```console\n$ ls\n```\n")
