"""Jobs whose control plane is protected by a secret, by TLS, or by both."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import trustme

from rallypoint.base.secrets import Secret, new_secret, token
from tests.jobs.launching import RALLYRUN, Launcher
from tests.jobs.nodes import Nodes, all_end, all_up, c10d
from tests.ports import free_port
from tests.processes import below


def certificates(folder: Path, *names: str) -> str:
    """The `--rdzv-conf` of nodes whose certificates are of these names."""
    authority, paths = trustme.CA(), [folder / name for name in ("cert.pem", "key.pem", "ca.pem")]
    certificate = authority.issue_cert(*names)
    certificate.cert_chain_pems[0].write_to_path(paths[0])
    certificate.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    return ",".join(f"{name}={path}" for name, path in zip(("tls_cert", "tls_key", "tls_ca"), paths, strict=True))


def shown(pid: int) -> bytes:
    """What other processes may read of one, if it is there: its environment and command line."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_the_secret_reaches_no_other_process_and_no_line(rallyrun: Launcher) -> None:
    secret = new_secret()
    job = c10d(rallyrun, "2", "--preload=json", env={"RALLYPOINT_SECRET": secret, "LOGLEVEL": "DEBUG"})
    nodes = job.up(hosted=True)
    for node in nodes:
        others = below(node.job.pid)
        assert not [pid for pid in others if secret.encode() in shown(pid)]
        assert len({*others} & {*below(node.job.pid)}) >= 4, "supervisor, reaper, zygote and worker were looked at"
    job.say("finish")
    all_end(nodes, 0)
    assert not [node.name for node in nodes if secret in node.job.err + "".join(node.job.out)]


def test_a_node_with_the_job_s_token_meets_one_with_the_secret(rallyrun: Launcher) -> None:
    secret = new_secret()
    job = c10d(rallyrun, "2")
    a = job.host("A", env={"RALLYPOINT_SECRET": secret})
    other = job.start("other", env={"RALLYPOINT_SECRET": token(Secret((secret,)), "another job")})
    assert other.job.ends() == 1
    assert "RALLYPOINT_SECRET is not the job's" in other.job.err
    b = job.start("B", env={"RALLYPOINT_SECRET": token(Secret((secret,)), "job")})
    all_up([a, b], world_size=2)
    job.say("finish")
    all_end([a, b], 0)


def test_a_job_over_tls_with_a_secret_regroups(rallyrun: Launcher, tmp_path: Path) -> None:
    conf = certificates(tmp_path, "127.0.0.1")
    job = c10d(rallyrun, "2", "--max-restarts=1", conf=conf, env={"RALLYPOINT_SECRET": new_secret()})
    nodes = job.up(hosted=True)
    job.say("fail-B-0")
    all_up(nodes, starts=2)
    job.say("finish")
    all_end(nodes, 0)


def test_a_node_without_a_certificate_is_told_what_to_give(rallyrun: Launcher, tmp_path: Path) -> None:
    conf = certificates(tmp_path, "127.0.0.1")
    job = c10d(rallyrun, "2")
    a = job.start("A", f"--rdzv-conf={conf}", env={"LOGLEVEL": "INFO"})
    a.job.until_err("control plane listens on port")
    plain = job.start("plain")
    assert plain.job.ends() == 1
    assert "accepts only TLS; set tls_cert" in plain.job.err
    b = job.start("B", f"--rdzv-conf={conf}")
    all_up([a, b], world_size=2)
    job.say("finish")
    all_end([a, b], 0)


def listening_at(port: int) -> set[str]:
    """The addresses at which somebody on this machine listens on a port, as the kernel writes them."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}


def test_the_store_of_a_job_on_this_machine_cannot_be_reached_from_others(rallyrun: Launcher) -> None:
    node = Nodes(rallyrun, "--standalone").start("A")
    node.comes_up(1)
    assert listening_at(int(node.last(1)[0]["MASTER_PORT"])) == {"0100007F"}  # 127.0.0.1, in the machine's byte order
    (rallyrun.folder / "finish").touch()
    assert node.job.ends() == 0


def test_it_is_said_where_not_all_nodes_can_connect(rallyrun: Launcher) -> None:
    flags = ["--nnodes=1:400", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job"]
    script = rallyrun.script("print('ran')")
    limited = ["bash", "-c", 'ulimit -n 400; exec "$@"', "-", *RALLYRUN]
    job = rallyrun.command([*limited, *flags, "--rdzv-conf=last_call_timeout=1", script])
    assert job.ends() == 0
    (told,) = [line for line in job.err.splitlines() if "open files" in line]
    assert "Up to 400 nodes of this job need 656 open files in this process, but its limit is 400" in told
    assert "raise the hard limit" in told
