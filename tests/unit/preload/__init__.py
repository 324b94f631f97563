"""The feature `preload`: what it imports in advance, what can be forked, and how a copy becomes a worker."""
