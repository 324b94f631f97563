"""The common base of all packages. It knows nothing about jobs, nodes or workers."""
