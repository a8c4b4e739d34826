"""Programs of a launch, which run in processes of their own."""
