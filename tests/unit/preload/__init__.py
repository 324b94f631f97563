"""The feature `preload`: what is imported ahead, what may be forked, and how a copy becomes a worker."""
