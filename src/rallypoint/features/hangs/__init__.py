"""A job none of whose ranks gives a sign of life: found, explained, and reported, restarted or ended."""
