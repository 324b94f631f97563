"""Masking secrets in environments, command lines and texts."""

from __future__ import annotations

import time

import pytest

from rallypoint.observe.bundle import (
    MASK,
    helpful_variables,
    is_secret_name,
    mask_command,
    mask_environment,
    mask_strings,
    mask_text,
)

SECRET = "correct-horse-battery"


@pytest.mark.parametrize(
    "name",
    [
        *("RALLYPOINT_SECRET", "WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "SSH_PRIVATE", "apikey", "api-key", "Authorization", "SLACK_WEBHOOK"),
        *("SENTRY_DSN", "COOKIE", "DB_PASS", "AZURE_STORAGE_CONNECTION_STRING"),
        *("ROOTPW", "dbpw", "DBPASS", "MYKEY", "MY_PW", "DBPWD", "AccountKey", "sig"),
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)
    assert mask_environment({name: SECRET}) == {name: MASK}


HARMLESS = (
    "PATH KEYBOARD MONKEY TOKENIZERS_PARALLELISM MASTER_ADDR SSH_AUTH_SOCK PWD COMPASS BYPASS HOTKEY DESIGN OLDPWD"
)


@pytest.mark.parametrize("name", [*HARMLESS.split(), "AUTHOR"])
def test_harmless_names(name: str) -> None:
    assert mask_environment({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    "value",
    [
        *("ghp_0123456789abcdefghijABCDEFGHIJ012345", "hf_abcdefghijklmnopqrstuvwxyz012345"),
        *("sk-proj-abcdefghijklmnop0123", "AKIAIOSFODNN7EXAMPLE", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc"),
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
        *("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "Bearer abcdef0123456789"),
        *("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "aws=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
        "/9j4AAQSkZJRgABAQ/EAYABgAAD5iW0gA2Kx9LmQ",
    ],
)
def test_tokens(value: str) -> None:
    found = mask_environment({"HARMLESS": f"before {value} after"})["HARMLESS"]
    assert value.removeprefix("aws=") not in found
    assert MASK in found
    assert found.startswith("before ")


@pytest.mark.parametrize(
    "value",
    [
        *("/home/user/very/long/path/to/some/checkpoint/step_000012000/model.safetensors", "one,two,three", "true"),
        *("node[001-128].cluster.example.org:29400", "torch.distributed.elastic.multiprocessing.errors"),
        *("GPU-17a8749f-2e5f-49c9-9f57-d314a9dc5cc4", "17a8749f-2e5f-49c9-9f57-d314a9dc5cc4"),
        *("runs/exp12/Checkpoints/model/weights0001", "/data/2026-11-28/ImageNet/train/n01440764"),
        *("mkdir -p /data/x", "ssh -p 2222 node1", "docker run -p 8080:80 image", "tar -u me"),
    ],
)
def test_harmless_values(value: str) -> None:
    assert mask_text(value) == value


def test_command_lines() -> None:
    assert mask_command([f"--token={SECRET}", "train.py"]) == [f"--token={MASK}", "train.py"]
    words = ["rallyrun", "train.py", "--api-key", SECRET, f"--model-token={SECRET}", "--lr=0.1", "--tokens", "--keep"]
    masked = [word.replace(SECRET, MASK) for word in words]
    assert mask_command(words) == masked


@pytest.mark.parametrize(
    "words",
    [
        ("mysql", "-p", "hunter2"),
        ("mysql", "-phunter2"),
        ("curl", "-u", "me:hunter2"),
        ("env", "ROOTPW=hunter2"),
        ("train.py", "--url=https://me.blob.core.windows.net/c?sig=hunter2&se=2026"),
        ("train.py", "--note=password=hunter2"),
        ("train.py", "--config", "db: {password: hunter2}"),
        ("train.py", "-p=hunter2", "--pw", "hunter2"),
    ],
)
def test_secrets_of_a_command_line(words: tuple[str, ...]) -> None:
    assert "hunter2" not in " ".join(mask_command(words))


@pytest.mark.parametrize(
    "text",
    [
        '{"user": "me", "password": "hunter2 and more", "port": 1}',
        '{"db": {"passwd":"hunter2"}}',
        r"config={\"api_key\": \"hunter2\"}",
        "{'secret': 'hunter2'}",
        "mysql --user me --password hunter2 db",
        "curl -token hunter2",
        "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=hunter2==;EndpointSuffix=core.windows.net",
        "https://me.blob.core.windows.net/c?sv=2022&sig=hunter2%3D&se=2026",
        "postgres://me:hun/hunter2@x@db:5432/x",
        "redis://:hunter2@cache:6379/0",
        "https://hooks.slack.com/services/T0000/B0000/hunter2",
        "https://discord.com/api/webhooks/1234/hunter2",
        "password: hunter2",
        "export MY_PW=hunter2",
        "mysql -p hunter2 db",
        "curl -u me:hunter2 https://x",
        "url=https://me.blob.core.windows.net/c?sig=hunter2",
        "level: info: password: hunter2",
    ],
)
def test_secrets_in_texts(text: str) -> None:
    found = mask_text(text)
    assert "hunter2" not in found
    assert MASK in found


def test_only_secrets_are_masked() -> None:
    for text in (
        "postgres://{}@db:5432/x",
        "user=me,password={},prefix=/a",
        '{"user": "me", "password": {}, "port": 1}',
        "train.py --lr 0.1 --token {} --steps 5",
    ):
        secret = "me:hunter2" if "://" in text else '"hunter2"' if '"' in text else "hunter2"
        assert mask_text(text.replace("{}", secret)) == text.replace("{}", MASK)
    text = 'Traceback (most recent call last):\n  File "train.py", line 3, in main\nValueError: step: 12, loss=0.5\n'
    assert mask_text(text) == text


def test_helpful_variables() -> None:
    environ = dict.fromkeys(
        ("NCCL_DEBUG", "SLURM_JOB_ID", "RANK", "MASTER_ADDR", "CUSTOMER_NAME", "MY_FLAG", "MY_NAME"), "1"
    )
    kept = ["NCCL_DEBUG", "SLURM_JOB_ID", "RANK", "MASTER_ADDR"]
    assert list(helpful_variables(environ)) == kept
    assert list(helpful_variables(environ, ["MY_*"])) == [*kept, "MY_FLAG", "MY_NAME"]
    assert list(helpful_variables(environ, ["MY_FLAG", "OTHER"])) == [*kept, "MY_FLAG"]
    assert helpful_variables(environ, ["*"]) == environ
    assert mask_environment({"RALLYPOINT_NOTICES": "/tmp/x"}) == {"RALLYPOINT_NOTICES": MASK}


@pytest.mark.parametrize(
    "unit",
    [
        *("a", "0123456789abcdef", "a://x:", "a://x@", "-a.b", "a_", 'a=\\"', "https://a.discord", "-----BEGIN A"),
        *("eyJaaaaaaaa.", "a=", "key=", "sig: "),
    ],
)
def test_long_lines(unit: str) -> None:
    """A search blocks the agent's other threads, and half a megabyte of output is searched."""
    text = unit * (500_000 // len(unit))
    began = time.thread_time()
    mask_text(text)
    assert time.thread_time() - began < 10, "quadratic time would be minutes"


def test_mask_strings() -> None:
    value = {"headline": "token=hunter2", "causes": [{"message": "postgres://me:hunter2@db/x", "rank": 3}], "at": 1.5}
    assert mask_strings(value) == {
        "headline": f"token={MASK}",
        "causes": [{"message": f"postgres://{MASK}@db/x", "rank": 3}],
        "at": 1.5,
    }
