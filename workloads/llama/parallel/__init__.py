"""The axes along which a Llama workload is parallel: the device mesh, and one module per axis."""
