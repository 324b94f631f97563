"""What is masked of environments and command lines, and what stays readable."""

from __future__ import annotations

import pytest

from rallypoint.observe.masking import MASK, is_secret_name, mask_command, mask_environment, mask_text

SECRET = "correct-horse-battery"


@pytest.mark.parametrize(
    "name",
    [
        *("RALLYPOINT_SECRET", "WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "SSH_PRIVATE", "apikey", "api-key", "Authorization", "SLACK_WEBHOOK"),
        *("SENTRY_DSN", "COOKIE", "DB_PASS", "AZURE_STORAGE_CONNECTION_STRING"),
    ],
)
def test_names_that_say_so(name: str) -> None:
    assert is_secret_name(name)
    assert mask_environment({name: SECRET}) == {name: MASK}


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "KEYBOARD",
        "MONKEY",
        "TOKENIZERS_PARALLELISM",
        "MASTER_ADDR",
        "SSH_AUTH_SOCK",
        "PWD",
        "COMPASS",
        "AUTHOR",
    ],
)
def test_names_that_do_not(name: str) -> None:
    assert mask_environment({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    "value",
    [
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "hf_abcdefghijklmnopqrstuvwxyz012345",
        "sk-proj-abcdefghijklmnop0123",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "Bearer abcdef0123456789",
    ],
)
def test_values_that_look_like_tokens(value: str) -> None:
    found = mask_environment({"HARMLESS": f"before {value} after"})["HARMLESS"]
    assert value not in found
    assert MASK in found
    assert found.startswith("before ")


def test_passwords_in_urls_and_pairs() -> None:
    assert mask_text("postgres://me:hunter2@db:5432/x") == f"postgres://{MASK}@db:5432/x"
    assert mask_text("user=me,password=hunter2,prefix=/a") == f"user=me,password={MASK},prefix=/a"


@pytest.mark.parametrize(
    "value",
    [
        "/home/user/very/long/path/to/some/checkpoint/step_000012000/model.safetensors",
        "one,two,three",
        "node[001-128].cluster.example.org:29400",
        "torch.distributed.elastic.multiprocessing.errors",
        "GPU-17a8749f-2e5f-49c9-9f57-d314a9dc5cc4",
        "17a8749f-2e5f-49c9-9f57-d314a9dc5cc4",
        "true",
    ],
)
def test_what_is_no_secret_stays(value: str) -> None:
    assert mask_text(value) == value


def test_command_lines() -> None:
    words = ["rallyrun", "train.py", "--api-key", SECRET, f"--model-token={SECRET}", "--lr=0.1", "--tokens", "--keep"]
    shown = mask_command(words)
    assert SECRET not in " ".join(shown)
    assert shown == [
        "rallyrun",
        "train.py",
        "--api-key",
        MASK,
        f"--model-token={MASK}",
        "--lr=0.1",
        "--tokens",
        "--keep",
    ]
