"""Optional features. Only runs that use them import them, and plug them into the loop as sources and observers."""
