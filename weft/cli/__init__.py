"""Command line of weft: flags, commands, and errors in one line with exit code 2."""
