"""What tests of operators are written with."""
