"""Pages are read into what they have to run."""

from __future__ import annotations

import pytest

from tests.documents.blocks import Block, Hidden, PageError, page, problems

TEXT = """# A page
<!-- setting: torch, hosts -->
<!-- stands for: h1:2379 = $ETCD -->

<!-- file: train.py -->
```python
print("$ not a command")
```

<!-- run: cp a b
mkdir c -->
<!-- exit: 1, 0 -->
<!-- any order -->
```console
$ first --flag \\
      --another   # a comment
one
...
two
node1$ second
```

- In a list:

  ```console
  $ third
  ```

<!-- not run: needs a cluster -->
```console
$ kubectl apply
```
"""


def test_the_steps_of_a_page() -> None:
    read = page("page.md", TEXT)
    assert read.settings == {"torch", "hosts"}
    assert read.stands_for == {"h1:2379": "$ETCD"}
    kinds = [step.says.get("file") or step.language if isinstance(step, Block) else step.text for step in read.steps]
    assert kinds == ["train.py", "cp a b\nmkdir c", "console", "console", "console"]
    assert read.terminals == ("", "node1")
    assert [block.is_run for block in read.blocks] == [False, True, True, False]
    assert problems(read, TEXT) == []


def test_commands_have_their_lines_output_terminals_and_statuses() -> None:
    block = page("page.md", TEXT).blocks[1]
    first, second = block.commands
    assert (first.line, first.text) == (15, "first --flag \\\n      --another   # a comment")
    assert (first.output, first.terminal) == (("one", "...", "two"), "")
    assert (second.text, second.output, second.terminal) == ("second", (), "node1")
    assert block.codes == (1, 0)
    assert TEXT.splitlines()[second.line - 1] == "node1$ second"
    indented = page("page.md", TEXT).blocks[2]
    assert [command.text for command in indented.commands] == ["third"]


def test_output_before_the_first_command_belongs_to_an_earlier_one() -> None:
    [block] = page("page.md", "<!-- exit: 3 -->\n```console\nmore\n^C\n```\n").blocks
    assert (block.shown, block.commands, block.codes) == (("more", "^C"), (), (3,))


def test_one_status_is_that_of_the_last_command() -> None:
    [block] = page("page.md", "<!-- exit: 1 -->\n```console\n$ a\n$ b\n```\n").blocks
    assert block.codes == (0, 1)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- eixt: 1 -->\n```console\n$ a\n```\n",
        "<!-- exit: 1 -->\nProse.\n```console\n$ a\n```\n",
        "<!-- exit: 1 -->\n",
    ],
)
def test_a_comment_that_says_nothing_to_a_block_is_refused(text: str) -> None:
    with pytest.raises(PageError, match=r"page\.md"):
        page("page.md", text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```\nrallyrun train.py\n```\n", "names its language"),
        ("```sh\nrallyrun train.py\n```\n", "not in sh"),
        ("```text\n$ ls\n```\n", "not in `text`"),
        ("Prose:\n\n    rallyrun train.py\n", "in a terminal"),
        ("<!-- exit: 1 -->\n```python\n```\n", "only of a `console` block"),
        ("<!-- exit: 1, 2 -->\n```console\n$ a\n```\n", "more exit statuses"),
        ("<!-- not run -->\n```console\n$ a\n```\n", "wants a value"),
    ],
)
def test_where_a_command_could_hide(text: str, problem: str) -> None:
    [found] = problems(page("page.md", text), text)
    assert problem in found


def test_hidden_commands_are_steps() -> None:
    [step] = page("page.md", "<!-- run: ls -->\n").steps
    assert step == Hidden(1, "ls")
