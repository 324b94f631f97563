# For type checkers: the stores, and Any for the modules that are made when they are imported (`names`).
from typing import Any

from rallypoint.store.api import Store as Store
from rallypoint.store.client import TCPStore as TCPStore
from rallypoint.store.errors import QueueEmptyError as QueueEmptyError
from rallypoint.store.filestore import FileStore as FileStore
from rallypoint.store.plain import HashStore as HashStore
from rallypoint.store.prefix import PrefixStore as PrefixStore

__all__: list[str]

def __getattr__(name: str) -> Any: ...
