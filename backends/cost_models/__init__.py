"""Step-time models: rooflines from device figures, and lines and tables fitted to measurements."""
