"""The agent: one per node. It takes part in the rendezvous, runs the node's workers, and tells what happens to them."""
