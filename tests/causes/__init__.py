"""A corpus of failures: small programs that end in one real way each, and what a report of it must say."""
