"""Value types shared by all packages: requests, time, memory, decisions. Imports nothing else of Tandem."""
