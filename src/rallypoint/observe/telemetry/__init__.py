"""An agent's events (what happened) and metrics (numbers).

`agent_events` has an agent's events under our names, `events` under torch's; `handlers` sends them to handlers by name.
`metrics` has streams of numbers and their handlers. An agent may import `lazy` at start-up: it does nothing until
another of these modules is used.
"""
