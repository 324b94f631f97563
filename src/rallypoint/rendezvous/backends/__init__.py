"""One file for each of our rendezvous backends. A backend knows its service and the handler's parts, but no agent."""
