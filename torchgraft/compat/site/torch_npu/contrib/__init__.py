"""What is not part of the core."""
