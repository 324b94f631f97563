"""What an agent reports to machines about itself: events (things that happened) and metrics (numbers).

`events` are plain data, `handlers` says where they go by name, `recording` sends them there. `metrics` has streams of
numbers and their handlers. `story` has the events of an agent's run, `numbers` its metrics, and `lazy` is what the
agent may import at start-up: it costs nothing until somebody uses one of the others.
"""
