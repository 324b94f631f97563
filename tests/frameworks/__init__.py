"""Programs of other people's frameworks under `rallyrun`, with workers and agents killed (`make frameworks`)."""
