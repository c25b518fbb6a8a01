"""Readers and writers of graphs. A reader returns GraphFields, unchecked; Graph checks and wraps them."""
