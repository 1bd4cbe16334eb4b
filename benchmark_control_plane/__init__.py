"""Load tests, comparison reports and research experiments for Tandem and other serving systems."""
