"""The command line: parsing, commands, and error messages of one line with exit code 2."""
