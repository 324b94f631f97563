"""What can be set has an entry in the reference, and each entry is of something that is there."""

from __future__ import annotations

import ast
import re

import pytest
from docs.generate import environment, flags, rallyctl, rdzv_conf, torch_names

from rallypoint.cli.convert import OURS
from rallypoint.cli.flags import FLAGS
from rallypoint.compat.names import HOMES, MODULES
from rallypoint.rendezvous.backends.option_table import OPTIONS, OptionText
from rallypoint.rendezvous.backends.options import settings_of
from rallypoint.rendezvous.params import RendezvousParameters
from tests.sentences import trees

OF_LIBRARIES = frozenset({"NO_COLOR"})
"""Variables that a library reads which we use."""

_VARIABLE = re.compile(r"(?!(?:AF|MSG|SC|TCP)_)[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
"""What looks like an environment variable, and is no constant of the kernel."""


def test_each_flag_has_a_heading_and_its_facts() -> None:
    page = flags.page()
    assert re.findall(r"^### `(.*)`$", page, re.MULTILINE) == [flag.name for flag in FLAGS]
    for flag in FLAGS:
        assert flag.help in page
        assert not flag.from_environment or f"variable: `{flag.variable}`" in page


def test_what_is_said_of_flags_is_said_of_flags() -> None:
    assert flags.DETAILS.keys() - {flag.name for flag in FLAGS} == set()


def test_each_verb_and_each_of_its_flags_is_shown() -> None:
    page = rallyctl.page()
    assert len(rallyctl.verbs()) > 10
    for name, parser in rallyctl.verbs().items():
        section = page.split(f"\n## `rallyctl {name}`\n")[1].split("\n## ")[0]
        shown = [action.option_strings[-1] for action in parser._actions if action.option_strings]
        assert [each for each in shown if each != "--help" and f"`{each}" not in section] == []


def test_each_option_of_a_rendezvous_has_a_row_with_its_meaning() -> None:
    page = rdzv_conf.page()
    assert [option.name for option in OPTIONS if f"| `{option.name}` |" not in page] == []
    assert [option.name for option in OPTIONS if not option.meaning.endswith(".")] == []


@pytest.mark.parametrize("option", [option for option in OPTIONS if re.match(r"\d+( s)?$", option.default)])
def test_the_defaults_that_are_told_are_those_that_hold(option: OptionText) -> None:
    settings = settings_of(RendezvousParameters("c10d", "localhost:1", "job", 1, 2))
    if hasattr(settings, option.name):
        assert getattr(settings, option.name) == float(option.default.removesuffix(" s"))
    else:
        assert option.name in ("timeout", "read_timeout", "failure_grace")  # LaunchConfig's, etcd's, the agent's


def test_each_module_of_torchs_and_each_name_that_is_ours_is_listed() -> None:
    page = torch_names.page()
    names = [name for names in HOMES.values() for name in names.split()]
    assert [name for name in names if f"`{name}`" not in page] == []
    assert [path for path in MODULES if f"`rallypoint.compat.{path}`" not in page] == []


def test_each_variable_of_the_source_has_an_entry() -> None:
    told = {name for titles in environment.GROUPS.values() for names in titles.values() for name in names}
    of_flags = {flag.variable for flag in FLAGS}
    found = {text for tree in trees().values() for text in _constants(tree) if _VARIABLE.fullmatch(text)} | OURS
    missing = found - told - of_flags - environment.NO_VARIABLES
    assert missing == set(), "give each an entry in docs/generate/environment.toml"
    assert environment.NO_VARIABLES - found == set()


def test_each_entry_is_a_variable_of_the_source() -> None:
    told = {name for titles in environment.GROUPS.values() for names in titles.values() for name in names}
    source = {text for tree in trees().values() for text in _constants(tree)} | OURS | OF_LIBRARIES
    assert told - source == set(), "take them out of docs/generate/environment.toml"


def _constants(tree: ast.Module) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
