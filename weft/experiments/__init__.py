"""Several runs compared: strategies, and sweeps over options."""
