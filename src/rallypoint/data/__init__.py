"""Which samples a worker of an elastic job processes, and in what order. For workers, without torch."""
