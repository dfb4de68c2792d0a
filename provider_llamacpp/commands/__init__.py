"""The subcommands of the command line, one module each, imported when called.

A command module has ``DESCRIPTION`` and ``EXAMPLE`` for its ``--help``, ``add_arguments(parser)``,
and ``run(settings, options) -> int`` (the exit code). At its top it imports nothing heavy, so that
``--help`` answers at once.
"""
