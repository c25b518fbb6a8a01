"""Small helpers without dependencies on other packages of weft: errors, units, random keys, file formats."""
