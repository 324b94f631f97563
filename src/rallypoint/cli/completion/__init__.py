"""Completion scripts for shells, made from the parsers: `rallyctl completion SHELL`.

scripts     the scripts of all shells, and where they are installed
values      the completions of each flag's value
bash_tables the tables of each script, which stand in its template
zsh_tables  the same
fish_tables the same

Laws:

1. A script is self-contained: no TAB starts Python. Names of files and hosts are read by the shell.
2. The code of a shell is in its template, and the flags and verbs are in the tables, which are generated.
"""
