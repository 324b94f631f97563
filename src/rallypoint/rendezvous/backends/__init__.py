"""Our rendezvous backends, one file each. A backend knows its service and the handler's parts, but no agent."""
