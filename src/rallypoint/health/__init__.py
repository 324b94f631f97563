"""The agent's health, over HTTP (contract section 5.10).

`progress_probe` is what the agent leaves for it, `http` turns a request into a reply (pure), `http_server` does that on
the process's loop thread, and `check` has the names that torch's users know. The package takes callables and plain
data, and knows no agent.
"""
