"""man(7) from plain texts and inline Markdown. Pure.

Laws:

1. A text shows as it stands: what man(7) would take for a request or an escape is escaped.
2. Code is bold, and its dashes are those of the keyboard, so that they can be copied. Links show their text alone, and
   nothing where they stand in brackets of their own.
"""

from __future__ import annotations

import re

_WIDTH = 78
_ONLY_A_LINK = re.compile(r" \(\[[^\]]*\]\([^)]*\)\)")
_INLINE = re.compile(
    r"(`+)(?P<code>.+?)\1|\[(?P<link>[^\]]*)\]\([^)]*\)|\*\*(?P<bold>.+?)\*\*|\*(?P<italic>[^*\s][^*]*)\*"
)


def plain(text: str) -> str:
    """A text in which nothing is special."""
    return text.replace("\\", "\\e")


def code(text: str) -> str:
    """What is typed, in bold."""
    return f"\\fB{_keys(text)}\\fR"


def variable(text: str) -> str:
    """What stands for something else, in italics."""
    return f"\\fI{_keys(text)}\\fR"


def _keys(text: str) -> str:
    return (
        plain(text)
        .replace("-", "\\-")
        .replace("'", "\\(aq")
        .replace("`", "\\(ga")
        .replace("^", "\\(ha")
        .replace("~", "\\(ti")
    )


def inline(text: str) -> str:
    """A text with Markdown's code, links and emphasis, on one line."""
    text = _ONLY_A_LINK.sub("", " ".join(text.split()))
    parts, end = [], 0
    for match in _INLINE.finditer(text):
        parts.append(plain(text[end : match.start()]))
        end = match.end()
        if (link := match["link"]) is not None:
            parts.append(inline(link))
        else:
            shown = match["code"] or match["bold"]
            parts.append(code(shown) if shown else variable(match["italic"]))
    return "".join([*parts, plain(text[end:])])


def wrapped(text: str) -> str:
    """A line of man(7) as several that editors can show; none of them begins a request."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > _WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in lines) + "\n"


def paragraph(markdown: str) -> str:
    """A paragraph."""
    return f".PP\n{wrapped(inline(markdown))}"


def entry(tag: str, *texts: str) -> str:
    """A tag, in man(7), and what is said of it: paragraphs in Markdown."""
    first, *rest = texts
    more = "".join(f".IP\n{wrapped(inline(each))}" for each in rest if each)
    return f".TP\n{tag}\n{wrapped(inline(first))}{more}"


def example(command: str) -> str:
    """A command line, which is not filled."""
    return f".PP\n.RS 4\n.nf\n{code(command)}\n.fi\n.RE\n"


def section(title: str, *parts: str) -> str:
    """A section with its contents."""
    return f".SH {title}\n{_without_first(''.join(parts))}"


def subsection(title: str, *parts: str) -> str:
    """A part of a section."""
    return f".SS {title}\n{_without_first(''.join(parts))}"


def _without_first(text: str) -> str:
    """A text without the paragraph with which each section begins anyway."""
    return text.removeprefix(".PP\n")


def sentence(text: str) -> str:
    """A text that begins with a capital, unless that would change a name, and ends with a full stop."""
    text = text.strip()
    start = text[:1].upper() if re.match(r"[a-z]+[ ,:;]", text) else text[:1]
    return f"{start}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")
