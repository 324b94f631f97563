"""The examples of frameworks under `rallyrun`, with workers and nodes killed (`make test-all`, `make frameworks`)."""
