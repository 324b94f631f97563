"""Tests of `rallypoint.observe.hangs`."""
