"""Watching and steering a job: the messages, a watcher's end of a session, and the coordinator's."""

WATCHERS = "watching"
"""The name of the coordinator's part in the table of extensions."""
