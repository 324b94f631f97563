"""Processes: starting them, knowing when and how they end, and ending them."""
