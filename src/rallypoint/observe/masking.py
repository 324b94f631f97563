"""Secrets out of what is kept of a failure: environment variables, command lines, output. Pure.

A value is masked if its name says that it is secret, or if it looks like a token itself. Rather too much than too
little: what is masked can be asked for, and what was written to a shared disk cannot be taken back. Of an environment
only the variables are kept that help to understand a failure.

Law: each search looks a bounded way ahead from any place. Output can have lines of half a megabyte, and no other thread
of the agent runs during a search.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rallypoint.base.light_typing import Any

MASK = "<masked>"

_SECRET_NAME = re.compile(
    r"secret|token|passw|passphrase|(?:^|[_\-.])(?:pass|pwd?|auth|pat|keys?|cookie|sas|sig|dsn)(?:$|[_\-.])|apikey"
    r"|accesskey|credential|private|signature|authoriz|bearer|connection_?string|webhook"
    r"|(?<!com)(?<!by)(?<!tres)(?<!under)(?<!over)pass$|(?<!^)(?<!old)pwd$"
    r"|(?<!mon)(?<!tur)(?<!don)(?<!joc)(?<!hoc)(?<!whis)(?<!hot)keys?$",
    re.IGNORECASE,
)
_NOTICES = "RALLYPOINT_NOTICES"
"""The variable with the path of a folder whose name nobody else should know."""
_NOT_SECRET = re.compile(r"^(?:SSH_AUTH_SOCK|XAUTHORITY|TOKENIZERS_PARALLELISM|PWD|OLDPWD)$")
_HELPFUL = re.compile(
    r"^(?:(?:PY)?TORCH|TORCHELASTIC|NCCL|RCCL|GLOO|UCX|UCC|FI_|OFI_|IBV?_|CUDA|CUDNN|CUBLAS|NVIDIA|NVTE|HIP|ROCR|ROCM"
    r"|HSA|GPU|XPU|ZE_|ONEAPI|CCL_|OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|MALLOC|SLURM|PMIX?_|OMPI|MPI|HYDRA|FLUX"
    r"|KUBERNETES|RALLYPOINT|PET_|MASTER_|RANK$|LOCAL_|WORLD_SIZE$|GROUP_|ROLE_|NODE_|NNODES$|PYTHON|LD_|JAX|XLA"
    r"|TF_CONFIG$|TRITON|ACCELERATE|DEEPSPEED|FSDP|MEGATRON|TOKENIZERS|HF_HUB_OFFLINE$|LOGLEVEL$|HOSTNAME$|PATH$|PWD$"
    r"|TMPDIR$|LANG$|LC_|TZ$|VIRTUAL_ENV$|CONDA_PREFIX$|http_proxy$|https_proxy$|no_proxy$)",
    re.IGNORECASE,
)
"""Names of variables that help to understand a failure; each is masked like any other."""

_TOKENS = re.compile(
    r"-----BEGIN [A-Z ]{1,40}-----[\s\S]*?(?:-----END [A-Z ]+-----|$)"
    r"|\b(?:ghp|gho|ghu|ghs|ghr|github_pat|glpat|hf|npm|pypi|xox[abprs]|sk|rk|pk|rpt1|dckr_pat|shpat|ya29)[-_.]"
    r"[A-Za-z0-9_\-.]{12,}"
    r"|\b(?:AKIA|ASIA|AIza)[A-Za-z0-9_\-]{12,}"
    r"|\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]+(?:\.[A-Za-z0-9_\-]*)?"
    r"|\b(?:Bearer|Basic)\s+[A-Za-z0-9+/=_\-.]{8,}",
)
_IN_URL = re.compile(
    r"(?P<before>(?<![a-zA-Z])[a-zA-Z][a-zA-Z0-9+.\-]{0,30}://)(?:[^/\s@]{1,500}|[^/\s@:\"']{0,100}:[^\s\"']{1,500})@(?![^\s\"']{0,500}@)"
)
"""What stands before the last @: passwords may contain / and @."""
_HOOK = re.compile(
    r"(?P<before>https?://(?:hooks\.slack\.com/\w+|[\w.]{0,100}discord(?:app)?\.com/api/webhooks|[\w.\-]{0,100}webhook\.office\.com"
    r"|outlook\.office\.com/webhook)/)[^\s\"']+"
)
_LONG = re.compile(r"(?<![A-Za-z0-9+/=_\-.])[A-Za-z0-9+/_\-]{32,}={0,2}(?![A-Za-z0-9+/=_\-.])")
_LEAST_DIFFERENT = 12
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
"""What names jobs and GPUs."""
_PAIR = re.compile(
    r"(?P<name>(?<![A-Za-z0-9_\-.])[A-Za-z0-9_\-.]{1,400})(?P<sign>\\?[\"']?\s{0,4}(?:=|:)\s{0,4})"
    r"(?P<value>\\?\"(?:[^\"\\]|\\[^\"])*\\?\"|'[^']*'|[^,;\s&\"'}\])]+)"
)
"""A name and its value: `a=b`, `a: b`, and as in JSON, whose quotes may be escaped."""
_FLAG = re.compile(r"(?P<name>(?<![\w\-])--?[A-Za-z][A-Za-z0-9_\-.]{0,100})(?P<space>\s+)(?P<value>[^\s\-][^\s]*)")


def is_secret_name(name: str) -> bool:
    """Whether a variable, or a flag, of this name holds a secret."""
    return not _NOT_SECRET.match(name) and _SECRET_NAME.search(name) is not None


def mask_text(text: str) -> str:
    """A text without what looks like a token, and without values whose names say that they are secret."""
    text = _TOKENS.sub(MASK, text)
    text = _IN_URL.sub(rf"\g<before>{MASK}@", text)
    text = _HOOK.sub(rf"\g<before>{MASK}", text)
    text = _PAIR.sub(_pair, text)
    text = _FLAG.sub(_flag, text)
    return _LONG.sub(lambda found: MASK if _looks_random(found[0]) else found[0], text)


def mask_strings(value: Any) -> Any:
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, dict):
        return {name: mask_strings(each) for name, each in value.items()}
    return [mask_strings(each) for each in value] if isinstance(value, list | tuple) else value


def helpful_variables(environ: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """The variables that help to understand a failure.

    Args:
        environ: all variables.
        more: names of further ones; `NAME*` for all that begin so, `*` for all.
    """
    names = {each for each in more if not each.endswith("*")}
    begin = tuple(each[:-1] for each in more if each.endswith("*"))
    return {
        name: value
        for name, value in environ.items()
        if _HELPFUL.match(name) or name in names or (begin and name.startswith(begin))
    }


def mask_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by name, those that hold secrets masked."""
    return {
        name: MASK if value and (is_secret_name(name) or name == _NOTICES) else mask_text(value)
        for name, value in sorted(environ.items())
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


def _flag(found: re.Match[str]) -> str:
    return f"{found['name']}{found['space']}{MASK}" if is_secret_name(found["name"].lstrip("-")) else found[0]


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
