"""What a benchmark found, told to people and to continuous integration."""
