"""Worker processes: starting them, watching how they end, and ending them."""
