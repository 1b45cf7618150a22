"""Fits device profiles to measurements, and compares a profiled step with its estimate.

It imports `machine` and `estimate` of the cost model.
"""
