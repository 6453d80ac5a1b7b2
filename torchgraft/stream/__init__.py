"""Streams: what order a plan needs, and the proof that it has it. Pure functions, no device."""
