"""What is asked for, checked, as one `LaunchPlan`."""
