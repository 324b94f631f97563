"""What only some runs have: imported by these runs alone, and plugged into the loop as sources and observers."""
