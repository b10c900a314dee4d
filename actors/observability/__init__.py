"""Metrics and logs: wrappers around what runs, and the tables of what they export."""
