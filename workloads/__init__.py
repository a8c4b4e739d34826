"""The built-in workloads; installed as ``aorta_workloads``."""
