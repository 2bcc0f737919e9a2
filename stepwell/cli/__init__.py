"""The command `stepwell`: it only parses, calls and prints; what it calls can be used without it."""

from stepwell.cli._app import app, main

__all__ = ["app", "main"]
