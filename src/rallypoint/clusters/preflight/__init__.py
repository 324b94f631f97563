"""Checks whether this node can run a job before it joins one: `rallyctl check`, and `rallyrun --preflight`."""
