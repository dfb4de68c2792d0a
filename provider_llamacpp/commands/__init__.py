"""The subcommands of the command line, one module each, imported when called.

A command module has ``run(settings, options) -> int`` (the exit code).
"""
