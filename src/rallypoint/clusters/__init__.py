"""Reads a job from the environment of a cluster: Slurm, an MPI launcher, Kubernetes or another (`--cluster`)."""
