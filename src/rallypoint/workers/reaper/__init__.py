"""The reaper: a small process that starts the workers, so that whatever they spawn can be found and ended."""
