"""Services of a running process: cores, memory, clocks, streams, and the native extension."""
