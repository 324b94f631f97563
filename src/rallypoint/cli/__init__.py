"""`rallyrun`: torchrun's command line, read by a table of flags and turned into a `LaunchConfig`."""
