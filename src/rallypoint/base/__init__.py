"""Common base of all packages. Nothing here knows about jobs, nodes or workers."""
