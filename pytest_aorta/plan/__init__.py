"""Checking of options, devices and workload declarations, and the `LaunchPlan` made from them.

Libraries that not every run needs, jsonschema and pynvml, are imported in the functions that need them.
"""
