"""Small helpers without knowledge of graphs or networks: errors, units, random keys, files of records."""
