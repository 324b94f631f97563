"""Secrets out of what is kept of a failure: environment variables and command lines. Pure.

A value is masked if its name says that it is secret, or if it looks like a token itself. Rather too much than too
little: what is masked can be asked for, and what was written to a shared disk cannot be taken back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MASK = "<masked>"

_SECRET_NAME = re.compile(
    r"secret|token|passw|passphrase|(?:^|[_\-.])(?:pass|pwd|auth|pat|key|keys|cookie|sas|dsn)(?:$|[_\-.])|apikey"
    r"|accesskey|credential|private|signature|authoriz|bearer|connection_?string|webhook",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(r"^(?:SSH_AUTH_SOCK|XAUTHORITY|TOKENIZERS_PARALLELISM|PWD|OLDPWD)$")

_TOKENS = re.compile(
    r"-----BEGIN [A-Z ]+-----[\s\S]*?(?:-----END [A-Z ]+-----|$)"
    r"|\b(?:ghp|gho|ghu|ghs|ghr|github_pat|glpat|hf|npm|pypi|xox[abprs]|sk|rk|pk|rpt1|dckr_pat|shpat|ya29)[-_.]"
    r"[A-Za-z0-9_\-.]{12,}"
    r"|\b(?:AKIA|ASIA|AIza)[A-Za-z0-9_\-]{12,}"
    r"|\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]+(?:\.[A-Za-z0-9_\-]*)?"
    r"|\b(?:Bearer|Basic)\s+[A-Za-z0-9+/=_\-.]{8,}",
)
_IN_URL = re.compile(r"(?P<before>[a-zA-Z][a-zA-Z0-9+.\-]*://)[^/\s@]+@")
_LONG = re.compile(r"(?<![A-Za-z0-9+/=_\-.])[A-Za-z0-9+/_\-]{32,}={0,2}(?![A-Za-z0-9+/=_\-.])")
_LEAST_DIFFERENT = 12
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
"""What names jobs and GPUs."""
_PAIR = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_\-.]*)(?P<sign>=|:\s*)(?P<value>[^,;\s&]+)")


def is_secret_name(name: str) -> bool:
    """Whether a variable, or a flag, of this name holds a secret."""
    return not _NOT_SECRET.match(name) and _SECRET_NAME.search(name) is not None


def mask_text(text: str) -> str:
    """A text without what looks like a token, and without values whose names say that they are secret."""
    text = _TOKENS.sub(MASK, text)
    text = _IN_URL.sub(rf"\g<before>{MASK}@", text)
    text = _PAIR.sub(_pair, text)
    return _LONG.sub(lambda found: MASK if _looks_random(found[0]) else found[0], text)


def mask_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by name, those that hold secrets masked."""
    return {
        name: MASK if value and is_secret_name(name) else mask_text(value) for name, value in sorted(environ.items())
    }


def mask_command(words: Sequence[str]) -> list[str]:
    """A command line: also the word behind a flag such as `--api-key`, and the value of `--api-key=...`."""
    masked: list[str] = []
    follows = False
    for word in words:
        name, sign, _ = word.partition("=")
        if follows and not word.startswith("-"):
            masked.append(MASK)
        elif (
            sign
            and name.lstrip("-").replace("-", "_").replace(".", "_").isidentifier()
            and is_secret_name(name.lstrip("-"))
        ):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(mask_text(word))
        follows = word.startswith("-") and not sign and is_secret_name(word.lstrip("-"))
    return masked


def _pair(found: re.Match[str]) -> str:
    if not is_secret_name(found["name"]):
        return found[0]
    return f"{found['name']}{found['sign']}{MASK}"


def _looks_random(text: str) -> bool:
    """Whether a long word is none of a language, nor a path: letters of many kinds with digits among them."""
    if text.count("/") > 1 or text.startswith("/") or _UUID.search(text):
        return False
    kinds = (any(each.isdigit() for each in text), any(each.isalpha() for each in text))
    return all(kinds) and len(set(text)) >= _LEAST_DIFFERENT
