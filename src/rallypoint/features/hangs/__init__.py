"""Hangs: detects and explains that all ranks of a job are inactive, then reports, restarts or ends the job."""
