"""Pages run as readers would run them, and what is wrong with one is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents.blocks import page
from tests.documents.running import PageRun
from tests.documents.settings import Surroundings
from tests.jobs.launching import launching


def run(folder: Path, text: str) -> None:
    with launching(folder) as launcher:
        PageRun(page("page.md", text), launcher, Surroundings()).run()


def test_a_page_with_all_that_pages_can_say(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
<!-- stands for: h1:2379 = 127.0.0.1:4711 -->
<!-- run: mkdir beside && echo hidden > beside/file -->

<!-- file: beside/lines.py -->
```python
import sys
sys.stdout.write("b 2\\na 1\\n")
open("port", "w").write("29400")
```

<!-- exit: 0, 3, 0, 0 -->
```console
$ cat beside/file
hidden
$ (exit 3)
$ export KEPT=over \\
    ANOTHER=1
$ echo $KEPT \\$HOME h1:2379 1.5 \\
    and more
over $HOME h1:2379 27.25 and more
```

<!-- any order -->
```console
$ python beside/lines.py
a 1
b 2
$ cat port; echo
29400
```

<!-- still running -->
```console
first$ mkfifo pipe; echo opens; sh -c 'cat pipe; exec sleep 100'
opens
second$ until [ -p pipe ]; do :; done; echo there
there
```

```console
second$ echo through > pipe
```

<!-- exit: 130 -->
<!-- terminal: first -->
```console
through
^C
```

A command that nobody ends is sent ^C at the end.

<!-- still running -->
```console
first$ sleep 100
```
""",
    )


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("```console\n$ false\n```", "page.md:2: exit status 1, not 0"),
        ("<!-- exit: 1 -->\n```console\n$ true\n```", "page.md:3: exit status 0, not 1"),
        ("```console\n$ echo one\ntwo\n```", "page.md:2: other output"),
        ("```console\n$ echo one; echo two\none\n```", "page.md:2: other output"),
        ("```console\n$ echo one\none\n$ echo two\n```", "page.md:4: other output"),
        ("<!-- run: false -->\n```console\n$ true\n```", "page.md:1: exit status 1"),
        ("<!-- still running -->\n```console\n$ echo one\ntwo\n```", "page.md:3: ended before that, with status 0"),
        ("```console\none\n```\n```console\n$ true\n```", "page.md:1: no command is running"),
        ("```console\na$ echo one\none\nb$ echo one\ntwo\n```", "page.md:4: other output"),
        (
            "<!-- still running -->\n```console\n$ echo one; false\none\n```\n```console\n$ true\n```",
            "page.md:7: what ran here ended with status 1",
        ),
    ],
)
def test_what_is_wrong_is_found_with_its_line(tmp_path: Path, block: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        run(tmp_path, block)
