"""A job whose ranks are all inactive: detected, explained, and reported, restarted or ended."""
