"""Measured search: what measured steps of some plans say of the other plans, and whether to measure on."""
