"""The same command under real torchrun and under rallyrun: cases as tables, one runner, one table of differences."""
