"""One file for each rendezvous backend of ours. A backend knows its own service and the handler's parts, no agent."""
