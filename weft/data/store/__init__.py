"""Graph folders (stores): folders of .npy files with a manifest; writing, reading and verifying them."""
