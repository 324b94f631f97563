"""Keeps torch's compiler out of workers under test, which do not use it.

`DistributedDataParallel()` and every optimizer import it, only to tell it what not to compile: 1.7 s of a processor for
each worker. With this folder in PYTHONPATH, they find a module with the names that they ask for. Real jobs have the
real compiler, and so do the tests of preloading.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class _Nothing(MetaPathFinder, Loader):
    """Finds the compiler, and gives a module that compiles nothing."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        return ModuleSpec(fullname, self, is_package=True) if fullname == "torch._dynamo" else None

    def exec_module(self, module: Any) -> None:
        module.disable = lambda function, *_given, **_named: function
        module.graph_break = lambda *_given, **_named: None
        module.utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
        # `init_process_group` calls it where an optimizer was made before.
        module.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)


sys.meta_path.insert(0, _Nothing())
