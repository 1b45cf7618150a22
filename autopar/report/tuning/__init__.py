"""A measured search as a page."""
