"""Where the output of workers goes: log folders, redirection, tee, prefixes and the relay to the console."""
