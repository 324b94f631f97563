"""In the place of `torch.distributed.elastic.agent`."""
