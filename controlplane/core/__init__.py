"""The vocabulary: requests, time, memory and decisions. Imports nothing of ours and reads no clock."""
