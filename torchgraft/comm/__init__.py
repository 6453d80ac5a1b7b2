"""Collectives: what they are in a graph, where they run, and that all ranks agree on them."""
