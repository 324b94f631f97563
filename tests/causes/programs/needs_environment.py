"""A package is installed in the environment that is active, which is not the launcher's: all ranks fail."""

import only_in_my_environment  # type: ignore[import-not-found]

only_in_my_environment.train()
