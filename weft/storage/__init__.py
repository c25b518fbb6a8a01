"""Storage of rows and arrays outside of the device: in host memory or in files, and which tensors map a file."""
