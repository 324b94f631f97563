"""The recorded terminal session of the README: the real command on a real terminal, and what was seen as one SVG.

    make recording

`cast` runs the command and keeps what it wrote, in asciinema's format; `frames` is what a terminal showed of it and
when; `svg` draws that. The last two are pure.
"""
