"""What a cluster's environment says of a job: Slurm's, an MPI launcher's, Kubernetes's (`--cluster`)."""
