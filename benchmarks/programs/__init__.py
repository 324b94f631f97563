"""Programs that the benchmarks start as processes of their own: workers, servers, and what puts load on them."""
