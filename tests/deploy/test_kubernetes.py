"""`deploy/kubernetes` as kubectl renders it is valid, for the oldest and the newest Kubernetes that it is for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet, TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob

from rallypoint.cli.verdict import CODES
from rallypoint.failures.cause import Ending
from tests.deploy.manifests import (
    FOLDER,
    KUSTOMIZATIONS,
    SAMPLES,
    Manifest,
    jobs_in,
    of_kind,
    pod_of,
    rendered,
    sample,
    the_job,
    variables,
)

VERSIONS = ("1.29", "1.37")
PAGE = FOLDER.parents[1] / "docs" / "how-to" / "kubernetes.md"
_CUSTOM = {
    "JobSet": JobsetV1alpha2JobSet,
    "TrainingRuntime": TrainerV1alpha1TrainingRuntime,
    "TrainJob": TrainerV1alpha1TrainJob,
}
_OF_NO_USE = {CODES[each] for each in (Ending.PROGRAM, Ending.CONFIGURATION, Ending.REPEATED)}

WITH_A_JOB = [*(each for each in KUSTOMIZATIONS if each != "control-plane"), *SAMPLES]


def validate(manifest: Manifest) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_what_is_rendered_is_valid(name: str) -> None:
    manifests = rendered(name)
    assert manifests
    for each in manifests:
        validate(each)


def test_the_overlay_of_the_page_makes_the_job_of_a_users_own_program(tmp_path: Path) -> None:
    (overlay,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", PAGE.read_text(), re.S)
    shutil.copytree(FOLDER / "job", tmp_path / "job")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kustomization.yaml").write_text(overlay)
    manifests = rendered(str(tmp_path / "mine"))
    for each in manifests:
        validate(each)
    (container,) = pod_of(of_kind(manifests, "Job"))["containers"]
    (example,) = pod_of(of_kind(rendered("job"), "Job"))["containers"]
    assert container["image"] == "ghcr.io/me/train:7"
    assert container["args"] == [*example["args"][:-2], "my_train.py", "--lr=0.1"]
    assert of_kind(manifests, "PersistentVolumeClaim")["spec"]["storageClassName"] == "nfs"


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_valid(name: str) -> None:
    """Those of other projects by the models that these publish, and the Jobs in them as Jobs."""
    for each in sample(name):
        read = _CUSTOM[each["kind"]].from_dict(each)
        assert read is not None
        assert not unknown(each, read.to_dict()), "fields that the model does not have"
        for job in jobs_in(each):
            validate(job)


def unknown(given: Any, kept: Any, path: str = "") -> list[str]:
    """The fields that were given and not kept."""
    if isinstance(given, dict):
        missing = [f"{path}.{name}" for name in given if name not in kept]
        return missing + [
            each for name in given if name in kept for each in unknown(given[name], kept[name], f"{path}.{name}")
        ]
    if isinstance(given, list):
        return [each for index, item in enumerate(given) for each in unknown(item, kept[index], f"{path}[{index}]")]
    return []


@pytest.mark.parametrize("name", WITH_A_JOB)
def test_a_pod_is_tried_again_as_its_exit_code_says(name: str) -> None:
    job = the_job(name)
    spec, pod = job["spec"], pod_of(job)
    ignored, fails = spec["podFailurePolicy"]["rules"]
    (container,) = pod["containers"]
    assert ignored["action"] == "Ignore", "a disruption is seen before the code with which a pod answers to it"
    assert fails["action"] == "FailJob"
    assert set(fails["onExitCodes"]["values"]) == _OF_NO_USE
    assert fails["onExitCodes"]["containerName"] == container["name"]
    assert "--exit-codes=classified" in [*container["command"], *container.get("args", [])]
    assert (pod["restartPolicy"], spec["podReplacementPolicy"]) == ("Never", "Failed"), "as the policy needs"


@pytest.mark.parametrize("name", WITH_A_JOB)
def test_numbers_that_are_said_twice_are_the_same(name: str) -> None:
    job = the_job(name)
    spec, pod = job["spec"], pod_of(job)
    (container,) = pod["containers"]
    env = variables(container)
    assert env["RALLYPOINT_TERMINATION_GRACE"] == str(pod["terminationGracePeriodSeconds"])
    if "JOB_COMPLETIONS" in env:
        assert env["JOB_COMPLETIONS"] == str(spec["completions"]) == str(spec["parallelism"])
    ports = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
    assert str(ports.get("health", "")) == env.get("TORCHELASTIC_HEALTH_CHECK_PORT", "")
    assert container["securityContext"]["readOnlyRootFilesystem"], "which the tests of pods take for granted"
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(mounts) == {each["name"] for each in pod["volumes"]}
    assert env["RALLYPOINT_SECRET_FILE"].startswith(mounts["secret"] + "/")
    (shm,) = [each for each in pod["volumes"] if each["name"] == "shm"]
    assert (mounts["shm"], shm["emptyDir"]["medium"]) == ("/dev/shm", "Memory")


@pytest.mark.parametrize("name", [each for each in KUSTOMIZATIONS if each != "control-plane"])
def test_pods_find_each_other_by_the_headless_service(name: str) -> None:
    service, job = of_kind(rendered(name), "Service"), of_kind(rendered(name), "Job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], "else those that wait for each other are never found"
    assert service["metadata"]["name"] == pod_of(job)["subdomain"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}


def test_the_control_plane_is_found_by_its_service() -> None:
    manifests = rendered("control-plane")
    service, deployment = of_kind(manifests, "Service"), of_kind(manifests, "Deployment")
    budget = of_kind(manifests, "PodDisruptionBudget")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == labels
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]["type"]) == (1, "Recreate")
    (container,) = pod_of(deployment)["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {each["name"]: each["port"] for each in service["spec"]["ports"]}
    job = of_kind(rendered("job-at-control-plane"), "Job")
    endpoint = f"--rdzv-endpoint={service['metadata']['name']}:{ports['rendezvous']}"
    assert endpoint in pod_of(job)["containers"][0]["args"]
