"""A corpus of failures: small programs that each end in one realistic way, and what a report must say about it."""
