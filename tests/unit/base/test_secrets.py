from __future__ import annotations

import os
from pathlib import Path

import pytest

from rallypoint.base import secrets
from rallypoint.base.errors import UserError
from rallypoint.base.secrets import Secret, etcd_password, job_secret, new_secret, token

GOOD = "b7Jx0qN4m2Ls9TzWcVfYhKd3RgPaEu"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_taken", {})
    for name in (secrets.SECRET, secrets.ETCD_PASSWORD):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)


@pytest.mark.parametrize("word", ["hunter42", "2026-11-22", "a" * 43, "abcabcabcabcabcabcabcabc", "rpt1-short"])
def test_weak_secrets_are_refused(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv(secrets.SECRET, word)
    with pytest.raises(UserError) as raised:
        job_secret()
    assert word not in str(raised.value)


def test_secrets_are_removed_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secrets.SECRET, GOOD)
    monkeypatch.setenv(secrets.ETCD_PASSWORD, "x y")
    for _ in range(2):
        assert job_secret() == Secret((GOOD,))
        assert etcd_password() == "x y"
        assert not {secrets.SECRET, secrets.ETCD_PASSWORD} & set(os.environ)
    assert GOOD not in repr(job_secret())
    monkeypatch.setenv(secrets.SECRET, "")
    assert job_secret() is None


def test_a_token_works_for_one_job() -> None:
    master = Secret((new_secret(),))
    assert master != Secret((new_secret(),))
    own = Secret((token(master, "job7"),))
    assert own.keys("job7") == master.keys("job7")
    assert own.keys("job7") != master.keys("job8")
    with pytest.raises(UserError, match="is a job's token"):
        token(own, "job7")


def test_two_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    new, old, other = (new_secret() for _ in range(3))
    monkeypatch.setenv(secrets.SECRET, f"{new}\n{old}\n")
    found = job_secret()
    assert found is not None
    assert found.keys("j") == (*Secret((new,)).keys("j"), *Secret((old,)).keys("j"))
    monkeypatch.setenv(secrets.SECRET, f"{new} {old} {other}")
    with pytest.raises(UserError, match="3 secrets"):
        job_secret()


def test_permissions_of_a_secret_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{GOOD}\n")
    monkeypatch.setenv(f"{secrets.SECRET}_FILE", str(path))
    for mode in (0o644, 0o640, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(UserError, match=f"{mode:04o}"):
            job_secret()
    path.chmod(0o600)
    assert job_secret() == Secret((GOOD,))
    monkeypatch.setenv(secrets.SECRET, GOOD)
    with pytest.raises(UserError, match="both set"):
        job_secret()


def test_special_files_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe, 0o600)
    large.write_bytes(b"x" * 5000)
    large.chmod(0o600)
    for path, words in ((pipe, "regular"), (Path("/dev/zero"), "regular"), (large, "4096"), (tmp_path / "no", "read")):
        monkeypatch.setenv(f"{secrets.SECRET}_FILE", str(path))
        with pytest.raises(UserError, match=words):
            job_secret()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user: needs root")
def test_the_file_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(GOOD)
    path.chmod(0o600)
    os.chown(path, 12345, 12345)
    monkeypatch.setenv(f"{secrets.SECRET}_FILE", str(path))
    with pytest.raises(UserError, match="12345"):
        job_secret()
