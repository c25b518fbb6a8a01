"""Memory of this process: heap, limit, alignment of rows, and peak of tensors."""
