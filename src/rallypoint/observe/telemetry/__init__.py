"""An agent's events (things that happened) and metrics (numbers).

`agent_events` are what an agent tells in our words, `events` in torch's; `handlers` maps names to where they go, and
sends them there. `metrics` has streams of numbers and their handlers. `lazy` is what the agent may import at start-up:
it does nothing until somebody uses one of the others.
"""
