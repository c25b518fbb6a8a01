"""Readers and writers of graphs. A reader returns unchecked GraphFields; Graph checks and wraps them."""
