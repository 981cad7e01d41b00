"""Finds missing order between streams: read/write races, early frees, wrong events, leaks, collectives out of step."""
