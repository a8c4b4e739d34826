"""What pytest sees: hooks, options, markers, fixtures, terminal summary."""
