"""The feature `preload`: what it imports in advance, what may be forked, and how a copy becomes a worker."""
