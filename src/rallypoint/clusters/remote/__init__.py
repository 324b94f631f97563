"""Starts jobs on other machines over ssh (`rallyctl launch`)."""
