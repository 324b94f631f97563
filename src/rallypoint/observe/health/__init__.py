"""The agent's health, over HTTP. The package takes callables and plain data, and knows no agent."""
