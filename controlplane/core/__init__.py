"""The vocabulary: facts, time and memory. Imports nothing of ours, never reads a clock."""
