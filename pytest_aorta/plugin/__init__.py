"""The pytest plugin: hooks, options, markers, fixtures, terminal summary."""
