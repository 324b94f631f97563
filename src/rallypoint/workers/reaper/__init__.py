"""The reaper: a small process that starts the workers, so that all their descendants can be found and ended."""
