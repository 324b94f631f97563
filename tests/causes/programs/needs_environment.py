"""A package is installed in the active environment, but not in the launcher's: all ranks fail."""

import only_in_my_environment  # type: ignore[import-not-found]

only_in_my_environment.train()
