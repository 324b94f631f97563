"""`python -m docs.generate`: writes the reference pages anew, after a change of a flag, a verb or an option."""

from __future__ import annotations

from docs.generate import write_reference

write_reference()
