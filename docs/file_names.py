"""Shows the file name above each script on the site, from the comment that the tests read."""

from __future__ import annotations

import re

_FILE = re.compile(
    r"^<!-- file: (?P<name>.+?) -->\n(?P<comments>(?:<!--.*?-->\n)*)```(?P<language>\w+)\n", re.MULTILINE
)


def with_file_names(text: str) -> str:
    """A page whose blocks that stand for a file have its name as their caption.

    Args:
        text: the page, in Markdown; blocks within lists stay as they are.
    """
    return _FILE.sub(r"\g<comments>```{code-block} \g<language>\n:caption: \g<name>\n\n", text)
