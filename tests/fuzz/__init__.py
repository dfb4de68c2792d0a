"""Machines that feed the worker's parts what others may send: ``python -m tests.fuzz``.

Each ``*_machine`` is a ``hypothesis`` state machine: rules are what a server, an engine or a caller
may do next, invariants are the laws. ``targets`` are functions of bytes for ``atheris``, which
looks for new paths by coverage: ``make fuzz``. ``tests/test_fuzz*.py`` run all of it for seconds.
"""
