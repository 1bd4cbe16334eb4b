"""What will come: lengths, loads and times, with their uncertainty."""
