"""Timers, health, commands to engines, and shutdown."""
