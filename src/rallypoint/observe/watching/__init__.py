"""Watching and controlling a job: the messages, the watcher's side of a session, and the coordinator's."""

WATCHERS = "watching"
"""The name of the coordinator's extension."""
