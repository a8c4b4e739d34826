"""Small scripts, written for this, with faults that were reported in public."""
