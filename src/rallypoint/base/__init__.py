"""Floor 0: what every room stands on. Nothing here knows what a job, a node or a worker is."""
