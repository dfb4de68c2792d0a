"""Peers and limits: each does the worker's job, or a part of it, in its own natural style.

``python -m bench.drivers.NAME STUB_PORT SINK_PORT``; each is started fresh for each measurement.
"""
