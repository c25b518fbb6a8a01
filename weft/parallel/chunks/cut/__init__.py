"""How the rows of a rank are cut into chunks, and which rows stay on the device between them."""
