"""The agent's part of workers that continue in their processes (`rallypoint.inprocess`)."""
