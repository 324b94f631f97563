"""A folder that `ENVIRONMENT` puts in front of torch's compiler; see `sitecustomize`."""

from pathlib import Path

ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parent)}
