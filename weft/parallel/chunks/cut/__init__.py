"""Division of a rank's rows into chunks, and the choice of rows that stay on the device between chunks."""
