"""Whether this node can run a job, found out before it joins one: `rallyctl check`, and `--preflight` of `rallyrun`."""
