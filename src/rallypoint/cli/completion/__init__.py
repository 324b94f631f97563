"""Completion scripts for shells, made from the parsers: `rallyctl completion SHELL`.

scripts     the scripts of all shells, and where they are installed
values      what completes the value of each flag
bash_tables the tables of each script, which stand in its template
zsh_tables  the same
fish_tables the same

Laws:

1. A script is whole in itself: no TAB starts Python. Names of files and hosts are read by the shell.
2. What a shell does stands in its template, and which flags and verbs there are in the tables, which are generated.
"""
