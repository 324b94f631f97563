"""Which samples a worker of an elastic job works on, and in what order. For workers; torch is not needed."""
