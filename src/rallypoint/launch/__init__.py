"""The one place where the parts are put together: a `LaunchConfig` in, a running job out."""
