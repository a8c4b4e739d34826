"""Names of the environment variables that pytest-aorta reads or sets."""

# Set by the user or by the cluster.
NODE_RANK = "AORTA_NODE_RANK"
LEASE_DIR = "AORTA_LEASE_DIR"

# Set for the programs of a launch.
AGENT_PID = "AORTA_AGENT_PID"  # by the torchrun agent for its ranks; forked ranks read their parent's id
STORE = "AORTA_STORE"  # by the torchrun agent for its ranks: the file through which they meet, in the agent's memory
FIRST_PATH = "AORTA_FIRST_PATH"  # folders that a rank puts before, and after, its search path
LATE_PATH = "AORTA_LATE_PATH"
DEVICE = "AORTA_DEVICE"  # kind of device, for scripts too
PLANT = "AORTA_PLANT"  # a fault for the ranks, as JSON, by `aorta selftest`
RUN_DIR = "AORTA_RUN_DIR"  # for a command that starts its own ranks: the run folder
RANK_FOLDER = "AORTA_RANK_FOLDER"  # by a rank for itself and its children; the run folder above it has the plan

# What only we set: a launch inside a launch must not inherit these from the launch around it.
INTERNAL = {value for name, value in vars().copy().items() if name.isupper()} - {NODE_RANK, LEASE_DIR, PLANT}
