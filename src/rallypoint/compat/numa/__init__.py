"""In the place of `torch.numa`."""
