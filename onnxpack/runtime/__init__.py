"""Running a pack: the host lowering, the numpy reference device, and the session in front of them."""
