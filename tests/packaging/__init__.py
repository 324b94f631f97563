"""Whether what `make dist` makes can be installed, and works, under each Python that is supported and is here."""
