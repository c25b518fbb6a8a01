"""Reading and writing of files, and the formats of weft's own ones."""
