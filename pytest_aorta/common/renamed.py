"""Names of version 0.1 and what has taken their place. Version 0.3 no longer knows them."""

# Methods of ``distributed_world``, which work with a warning.
METHODS = {"launch": "run", "launch_script": "run_script", "launch_command": "run_command"}
# Options of pytest, which are accepted with a warning.
OPTIONS = {"--aorta-locate": "failures are located without it, and not with --aorta-no-locate"}
# Subcommands of ``aorta``, which are refused with the command to use.
COMMANDS = {
    "devices": "aorta doctor",
    "report": "pytest --aorta-ab=REF --aorta-report=report.html",
    "workloads": "aorta run --workload NAME, whose errors list workloads and keys",
}
