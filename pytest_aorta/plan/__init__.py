"""Checking of options, devices and workload declarations, and the `LaunchPlan` made from them."""
