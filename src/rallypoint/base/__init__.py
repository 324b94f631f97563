"""The common base of all packages. It knows nothing of jobs, nodes or workers."""
