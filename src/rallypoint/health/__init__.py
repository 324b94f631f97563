"""The agent's health, over HTTP (contract section 5.10).

`progress_probe` is what the agent leaves for it, `http` turns a request into a reply (pure), and `check` has the names
that torch's users know; the server itself is `base.http_server`. The package takes callables and plain data, and knows
no agent.
"""
