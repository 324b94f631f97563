"""The agent, one per node: takes part in the rendezvous, runs the node's workers, and reports their ends."""
