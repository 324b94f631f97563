"""Checks that the results of `make dist` install and work under each supported Python on this machine."""
