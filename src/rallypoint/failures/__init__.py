"""Floor 1: what killed a worker: error files, `record`, the cause of death and the report that a person reads."""
