"""What every package builds on. Nothing here knows what a job, a node or a worker is."""
