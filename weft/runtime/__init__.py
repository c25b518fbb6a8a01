"""What a process needs while it runs: cores, memory, clocks, streams, and the native extension."""
