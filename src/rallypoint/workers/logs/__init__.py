"""Workers' output: log folders, redirection, tee, prefixes and the relay to the console."""
