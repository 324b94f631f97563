"""Tests of `rallypoint.hangs`."""
