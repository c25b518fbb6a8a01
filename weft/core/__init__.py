"""Configuration, records, errors and keyed randomness. Knows no graph and no network."""
