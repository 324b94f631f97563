"""Bad etcds: one sentence each, a wait if that can help, and no changes to foreign keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from rallypoint.control.election.keys import ElectionKeys
from tests.etcd_cluster import EtcdCluster, ServerTls, running
from tests.jobs.launching import Launcher
from tests.jobs.nodes import Nodes, all_end, all_up
from tests.jobs.test_bad_input import FINE, refused
from tests.ports import free_port

WAITED_OUT = 2
"""Seconds of the join timeout, where it is to be waited out."""


def flags(endpoints: str, conf: str = "", *, job: str = "job", join_timeout: int = 60) -> list[str]:
    options = ",".join(["lease=10", f"join_timeout={join_timeout}", *([conf] if conf else [])])
    return [
        "--nnodes=2",
        "--rdzv-backend=etcd",
        f"--rdzv-id={job}",
        f"--rdzv-endpoint={endpoints}",
        f"--rdzv-conf={options}",
    ]


def at(etcd: EtcdCluster) -> str:
    return ",".join(str(each) for each in etcd.endpoints)


def test_options_that_cannot_work(rallyrun: Launcher) -> None:
    """Values of options that torchrun does not have end as wrong flags do; the others as they do there."""
    script = rallyrun.script(FINE)
    refused(rallyrun(*flags("127.0.0.1:1,a b"), script), "'a b'", "host:port", "--rdzv-endpoint")
    refused(rallyrun(*flags("127.0.0.1:1", "lease=soon"), script), "lease", "'soon'", code=2)


def test_one_wrong_endpoint_of_several_and_keys_of_others_among_ours_do_no_harm(
    rallyrun: Launcher, etcd: EtcdCluster
) -> None:
    endpoints, prefix = f"127.0.0.1:{free_port()},{at(etcd)}", f"/{rallyrun.mark}"
    etcd.ctl("put", ElectionKeys.for_job(prefix, "job").leader.decode(), "somebody's")
    jobs = [rallyrun(*flags(endpoints, f"prefix={prefix}"), rallyrun.script(FINE)) for _ in range(2)]
    assert [job.ends() for job in jobs] == [0, 0], [job.err for job in jobs]
    assert [job.out for job in jobs] == [["ran"], ["ran"]]


def test_where_no_etcd_answers_it_is_waited_until_the_join_deadline_and_one_that_comes_back_in_time_is_used(
    rallyrun: Launcher, etcd: EtcdCluster
) -> None:
    """There is none at one endpoint, and no quorum at others."""
    nowhere = f"127.0.0.1:{free_port()}"
    fine = rallyrun.script(FINE, "fine.py")
    nodes = Nodes(rallyrun, *flags(at(etcd), job=rallyrun.mark), env={"LOGLEVEL": "DEBUG"})
    for member in etcd.members[:2]:
        member.pause()
    late = [rallyrun(*flags(place, join_timeout=WAITED_OUT), fine) for place in (nowhere, at(etcd))]
    two = [nodes.start(name) for name in "AB"]
    for node in two:
        node.job.until_err("Rendezvous'ing worker group")
    for job, words in zip(late, ([nowhere], []), strict=True):
        refused(job, *words, "before the join deadline", "etcd")
    for member in etcd.members[:2]:
        member.resume()
    all_up(two, world_size=2)
    nodes.say("finish")
    all_end(two, 0)


def test_a_state_that_is_not_ours_is_left_as_it_is(rallyrun: Launcher, etcd: EtcdCluster) -> None:
    values = ["", "rallypoint-etcd-9 x 1 y", "rallypoint-etcd-1 abc 1 damaged", "somebody's"]
    script, begun = rallyrun.script(FINE), []
    for number, value in enumerate(values):
        prefix = f"/{rallyrun.mark}-{number}"
        etcd.ctl("put", f"{prefix}/job/state", value)
        etcd.ctl("put", f"{prefix}/job-of-others/state", "theirs")
        begun.append((prefix, value, rallyrun(*flags(at(etcd), f"prefix={prefix}"), script)))
    for prefix, value, job in begun:
        refused(job, f"{prefix}/job/state", "--rdzv-id")
        found = etcd.ctl("get", "--prefix", prefix).splitlines()
        assert found == [f"{prefix}/job-of-others/state", "theirs", f"{prefix}/job/state", value]


@pytest.fixture(name="secured", scope="module")
def _secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EtcdCluster, Path]]:
    """A member that wants a certificate and a password, and the folder with the files."""
    folder = tmp_path_factory.mktemp("secured")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name, identity in (("server", "127.0.0.1"), ("client", "agent.example")):
        made = ca.issue_cert(identity, common_name=name)
        made.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        made.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
    files = ServerTls(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    with running(folder, 1, tls=files) as cluster:
        cluster.enable_auth({"job": "its-password"})
        yield cluster, folder


def test_certificates_and_a_password_from_the_environment(
    rallyrun: Launcher, secured: tuple[EtcdCluster, Path]
) -> None:
    cluster, folder = secured
    conf = f"cacert={folder / 'ca.pem'},cert={folder / 'client.pem'},key={folder / 'client.key'},user=job"
    env = {"RALLYPOINT_ETCD_PASSWORD": "its-password"}
    jobs = [rallyrun(*flags(at(cluster), conf), rallyrun.script(FINE), env=env) for _ in range(2)]
    assert [job.ends() for job in jobs] == [0, 0], [job.err for job in jobs]
