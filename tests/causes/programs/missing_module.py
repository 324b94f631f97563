"""A package is not installed: all ranks fail."""

import no_such_tokenizer  # type: ignore[import-not-found]

no_such_tokenizer.load()
