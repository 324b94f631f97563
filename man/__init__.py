"""The manual pages, in man(7), made of the parsers and of the tables of the documents.

pages       what is on each page
roff        texts in Markdown as man(7)
share       all files that an installation puts below its `share/`, completion scripts among them

`make man` writes them; `hatch_build.py` has them in each wheel.
"""
