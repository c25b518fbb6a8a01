"""Rows and arrays that the device does not hold: in memory of the host, in files, and which tensors are mapped."""
