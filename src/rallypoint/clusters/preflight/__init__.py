"""Checks whether this node can run a job before it joins: `rallyctl check`, and `rallyrun --preflight`."""
