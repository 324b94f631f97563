"""All ranks connect to a store of the program's own, at a port where nobody listens, for half an hour."""

import datetime

import torch.distributed as dist

dist.TCPStore("127.0.0.1", 29777, is_master=False, timeout=datetime.timedelta(minutes=30))
