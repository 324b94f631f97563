"""The agent, one per node: joins the rendezvous, runs the node's workers, and reports how they end."""
