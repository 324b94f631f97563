"""What ended a worker: error files, `record`, the cause of death, and the report."""
