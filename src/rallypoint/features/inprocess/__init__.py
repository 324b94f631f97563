"""The agent's side of workers that continue in their processes (`rallypoint.inprocess`)."""
