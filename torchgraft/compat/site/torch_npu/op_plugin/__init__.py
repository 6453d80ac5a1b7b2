"""What op-plugin brings to Python."""
