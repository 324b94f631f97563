"""An agent's events (things that happened) and metrics (numbers).

`events` are plain data, `handlers` maps names to where they go, `recording` sends them there. `metrics` has streams of
numbers and their handlers. `event_factory` makes the events of an agent's run, `run_metrics` its metrics, and `lazy` is
what the agent may import at start-up: it does nothing until somebody uses one of the others.
"""
