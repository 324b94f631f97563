"""Worker processes: starts them, watches how they end, and ends them."""
