"""The page of all flags of `rallyrun`."""

from __future__ import annotations

from rallypoint.cli.flags import GROUPS


def page() -> str:
    """The page, in Markdown."""
    parts = ["# Flags of `rallyrun`\n"]
    for group in GROUPS:
        parts.append(f"## {group.title.capitalize()}\n")
        parts.extend(f"- `{flag.name}`: {flag.help}" for flag in group.flags)
        parts.append("")
    return "\n".join(parts)
